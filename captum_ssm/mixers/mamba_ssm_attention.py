"""mamba_ssm's softmax attention, in the hybrids that ``attn_layer_idx`` makes.

    q, k, v = conv(in_proj(h))        alpha = softmax(scale rotated(q) rotated(k)^T + mask)
    output = out_proj(alpha v)

The convolution, short and causal, and the rotation are there if a model asks for them, and v is
convolved, too: its values are those before.  The mask is there in a causal module, which is not the
default.  Queries in groups may share keys and values.  Frozen: the probabilities.

The module may keep further channels that pass a gated MLP, SiLU(z) x, and join the heads in
out_proj.  They mix no tokens and are, like the MLP of a block, no part of the operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Chain, Shape, ShortConv
from .base import Call, LinearMixer
from .parts.common import as_heads, frozen, run, working_dtype
from .parts.softmax import seen_pairs, softmax_attention


def mamba_ssm_attention(module: Any, call: Call) -> LinearMixer:
    """mamba_ssm's MHA."""
    call.refuse_cache("inference_params", position=1)
    hidden = call.argument("x", 0)
    projected = run(module.in_proj, hidden.to(working_dtype(module, hidden)))
    beside = module.mlp_dim // 2
    projected, up, gate = torch.split(
        projected, [projected.shape[-1] - 2 * beside, beside, beside], -1
    )
    unmixed = up * F.silu(gate)
    head, groups = module.head_dim, module.num_heads // module.num_heads_kv
    each = [module.num_heads * head, module.num_heads_kv * head, module.num_heads_kv * head]
    query, key, value = torch.split(projected, each, -1)
    convs: list[ShortConv] = []
    if module.d_conv > 0:
        query, key, conv = _convolved(module, projected, each)
        convs.append(conv)
    query, key = (as_heads(x, x.shape[-1] // head) for x in (query, key))
    if module.rotary_emb_dim > 0:
        query, key = (_rotated(x, module) for x in (query, key))
    values = as_heads(value, module.num_heads_kv).repeat_interleave(groups, 2)
    mask = seen_pairs(values.shape[1], values.device) if module.causal else None
    query, key = query.transpose(1, 2), key.repeat_interleave(groups, 2).transpose(1, 2)
    scale = head**-0.5 if module.softmax_scale is None else module.softmax_scale
    core, _ = softmax_attention(query, key, values, scale, mask)

    def project(y: Tensor) -> Tensor:
        return run(module.out_proj, torch.cat([y.flatten(2), unmixed], -1))

    return LinearMixer(values, Chain(core, *convs), project)


def _convolved(module: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, ShortConv]:
    """Queries and keys behind the convolution, and that of the values, repeated to the heads."""
    conv, groups = module.conv1d, module.num_heads // module.num_heads_kv
    weight = frozen(conv.weight, x).flip(-1)[:, 0]  # (C, K), by lag
    bias = None if conv.bias is None else frozen(conv.bias, x)
    channels = as_heads(x)
    own = None if bias is None else bias.view(1, 1, -1, 1)
    query, key, _ = torch.split(
        ShortConv(weight[:, None], Shape(*channels.shape), own).affine(channels).squeeze(-1),
        sizes,
        -1,
    )
    heads = torch.unflatten(weight[-sizes[2] :], 0, (module.num_heads_kv, -1))  # (H', P, K)
    if bias is not None:
        bias = torch.unflatten(bias[-sizes[2] :], 0, heads.shape[:2])
        bias = bias.repeat_interleave(groups, 0)[None, None]
    shape = Shape(x.shape[0], x.shape[1], module.num_heads, module.head_dim)
    return query, key, ShortConv(heads.repeat_interleave(groups, 0), shape, bias)


def _rotated(x: Tensor, module: Any) -> Tensor:
    """The first channels of each head (B, L, H, N) turned by angles that grow with the position."""
    rotary, turned = module.rotary_emb, module.rotary_emb_dim
    counted = torch.arange(0, turned, 2, device=x.device, dtype=torch.float32)
    rate = rotary.base ** -(counted / turned)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None, None] * rate
    cos, sin = angle.cos().to(x), angle.sin().to(x)  # (L, 1, N' / 2)
    moved, rest = torch.split(x, [turned, x.shape[-1] - turned], -1)
    if rotary.interleaved:
        a, b = torch.unflatten(moved, -1, (-1, 2)).unbind(-1)
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = moved.chunk(2, -1)
        pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([pairs, rest], -1)
