"""Softmax attention in timm's vision transformers, torch.nn and mamba_ssm.

    q, k, v = projections of x      alpha = softmax(scale q k^T + mask)      y = gate alpha v

The output is out_proj(y).  Fused and unfused modules, with or without returned weights, compute
the same function, so the operator is recomputed from the arguments.  Frozen: the probabilities, and
timm's gate if there is one.

mamba_ssm's attention, in hybrid models with ``attn_layer_idx``, may have a rotation and a short
causal convolution of q, k and v; the mixer's values are v before the convolution.  Only a causal
module has a mask, and the default is not causal.  Groups of queries may share keys and values.
The module may have extra channels with a gated MLP, SiLU(z) x, which are concatenated with the
heads before out_proj.  They do not mix tokens, so they are not in the operator, like a block's MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedMixerError
from .base import Call, LinearMixer
from .parts.common import as_heads, linear, mixer_input, run
from .parts.softmax import seen_pairs
from .path import Path


def timm_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize timm.layers.Attention: softmax attention, and a gate in some models."""
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        raise UnsupportedMixerError(
            f"{type(module).__name__} with scale_norm=True: a norm of attention's output over all "
            "heads is not supported. Use a model with scale_norm=False."
        )
    hidden = mixer_input(module, call, "x")
    query, key, values = torch.unflatten(
        run(module.qkv, hidden), -1, (3, module.num_heads, -1)
    ).unbind(2)  # (B, L, H, P)
    query, key = (
        run(norm, x.transpose(1, 2)).transpose(1, 2)
        for norm, x in ((module.q_norm, query), (module.k_norm, key))
    )
    mask = call.argument("attn_mask", 1)
    if call.argument("is_causal", 2):
        mask = seen_pairs(hidden.shape[1], hidden.device)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]  # leading dimensions of size 1
    path = Path(values).attend(query, key, module.scale, mask)
    if getattr(module, "gate", None) is not None:
        path.gate(run(module.gate, hidden), torch.sigmoid)
    return path.to(module.proj)


def torch_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize nn.MultiheadAttention; refuse calls other than self-attention."""
    _check_inputs(
        module, [call.argument(name, i) for i, name in enumerate(("query", "key", "value"))]
    )
    hidden, heads = mixer_input(module, call), module.num_heads
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    bias = module.in_proj_bias
    biases = (None, None, None) if bias is None else bias.chunk(3)
    query, key, values = (
        as_heads(linear(hidden, w, b), heads) for w, b in zip(weights, biases, strict=True)
    )
    path = Path(values).attend(query, key, module.head_dim**-0.5, _score_mask(module, call, hidden))
    return path.to(module.out_proj)


def _check_inputs(module: Any, inputs: list[Tensor]) -> None:
    """Raise UnsupportedMixerError unless the call is self-attention with the batch first."""
    query, *keys_and_values = inputs
    name = type(module).__name__
    if any(x is not query and not _are_equal(x, query) for x in keys_and_values):
        raise UnsupportedMixerError(
            f"{name} is called on a query tensor that differs from its keys or values. Only "
            "self-attention is supported: pass the same tensor as query, key and value."
        )
    if query.dim() == 3 and not module.batch_first:
        raise UnsupportedMixerError(
            f"{name} with batch_first=False is not supported. Create it, or the layer around it, "
            "with batch_first=True, and pass inputs of shape (B, L, E)."
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedMixerError(
            f"{name} with add_bias_kv or add_zero_attn has keys that are not tokens, which is not "
            "supported. Create it with add_bias_kv=False and add_zero_attn=False."
        )


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _score_mask(module: Any, call: Call, hidden: Tensor) -> Tensor | None:
    """Return the mask term to add to the scores, broadcastable to (B, H, L, L), or None."""
    batch, tokens, _ = hidden.shape
    pairs, padding = call.argument("attn_mask", 5), call.argument("key_padding_mask", 3)
    terms = []
    if pairs is not None:
        # torch takes (L, L) or (B H, L, L)
        shape = (tokens, tokens) if pairs.dim() == 2 else (-1, module.num_heads, tokens, tokens)
        terms.append(_score_term(pairs, hidden).view(shape))
    if padding is not None:
        terms.append(_score_term(padding, hidden).view(batch, 1, 1, tokens))
    if not terms:
        return None
    total = sum(terms[1:], terms[0])
    return total[(None,) * (4 - total.dim())]  # leading dimensions of size 1


def _score_term(mask: Tensor, hidden: Tensor) -> Tensor:
    """Convert a mask to a term to add to the scores; a boolean mask is True for hidden tokens."""
    if mask.dtype != torch.bool:
        return mask.to(hidden)
    return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(mask, -torch.inf)


def mamba_ssm_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize mamba_ssm's MHA: softmax attention, after a convolution in some models."""
    call.refuse_cache("inference_params", position=1)
    projected = run(module.in_proj, mixer_input(module, call, "x"))
    mlp_width, head, kv_heads = module.mlp_dim // 2, module.head_dim, module.num_heads_kv
    query_width, width = module.num_heads * head, kv_heads * head
    sizes = [query_width + 2 * width, mlp_width, mlp_width]
    projected, mlp_value, mlp_gate = torch.split(projected, sizes, -1)
    mlp, path = mlp_value * F.silu(mlp_gate), Path(projected)
    queries_per_key = module.num_heads // kv_heads
    if module.d_conv > 0:
        path.conv(module.conv1d)
    query, key, _ = torch.split(path.now.squeeze(-1), [query_width, width, width], -1)
    query, key = (as_heads(x, x.shape[-1] // head) for x in (query, key))
    if module.rotary_emb_dim > 0:
        query, key = (_rotate(x, module) for x in (query, key))
    path = path.narrow(-width, width, kv_heads).repeat(queries_per_key)  # the values
    key = key.repeat_interleave(queries_per_key, 2)
    mask = seen_pairs(key.shape[1], key.device) if module.causal else None
    scale = head**-0.5 if module.softmax_scale is None else module.softmax_scale
    path.attend(query, key, scale, mask)
    return path.to(lambda y: run(module.out_proj, torch.cat([y, mlp], -1)))


def _rotate(x: Tensor, module: Any) -> Tensor:
    """Apply the module's rotary embedding to the first N' channels of each head (B, L, H, N)."""
    rotary, rotated_width = module.rotary_emb, module.rotary_emb_dim
    even_channels = torch.arange(0, rotated_width, 2, device=x.device, dtype=torch.float32)
    rate = rotary.base ** -(even_channels / rotated_width)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None, None] * rate
    cos, sin = angle.cos().to(x), angle.sin().to(x)  # (L, 1, N' / 2)
    to_rotate, rest = torch.split(x, [rotated_width, x.shape[-1] - rotated_width], -1)
    if rotary.interleaved:
        a, b = torch.unflatten(to_rotate, -1, (-1, 2)).unbind(-1)
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = to_rotate.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([rotated, rest], -1)
