"""Lightning attention: transformers' minimax.

    q, k, v = mask SiLU(W h)
    S[t] = exp(-slope) S[t-1] + k[t] v[t]^T,      s[t] = q[t] S[t]
    y = sigmoid(W_g h) w s / rms(s)               output = W_o y

with a constant slope per head and the norm over all channels together.  Frozen: q, k, the mask,
the ratio SiLU(u) / u, 1 / rms and the gate.

The block normalizes first and adds the output, times beta, to the normalized h, times alpha, so
that its stream is alpha (h + beta / alpha output).  The norm that follows removes the common
factor alpha; beta / alpha is therefore the scale of the branch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..operators import Chain, Diagonal, ScalarDecayHeads, Shape
from .base import Call, LinearMixer
from .parts.common import activation_ratio, as_heads, masked, padding_mask, run, working_dtype


def lightning_attention(module: Any, call: Call) -> LinearMixer:
    """transformers' MiniMaxLightningAttention."""
    call.refuse_cache("past_key_values", position=3)
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    mask = padding_mask(call.argument("attention_mask", 2), hidden)
    heads, per_head = module.num_attention_heads, module.head_dim
    u = as_heads(run(module.qkv_proj, hidden), heads)  # (B, L, H, 3 P)
    name = type(module.act_fn).__name__.removesuffix("Activation")
    ratio = activation_ratio(module.act_fn, name.lower(), u)
    query, key, value = torch.split(u * ratio, per_head, -1)
    if mask is not None:
        keep = mask[:, :, None, None]
        query, value = query if _padding_reads(module) else query * keep, value * keep
    values, shape = u[..., 2 * per_head :], Shape(*value.shape)
    slope = module.slope_rate.to(u).view(1, 1, heads)
    scan = ScalarDecayHeads(query, key, -slope.expand(shape[:3]), None, per_head)
    mixed = scan.apply(value)
    square = mixed.square().mean((-1, -2), keepdim=True)
    weight = module.norm.weight.to(u).view(heads, per_head)
    gate = torch.sigmoid(run(module.output_gate, hidden))
    operator = Chain(
        Diagonal(as_heads(gate, heads), shape, "gate", at_rest=0.5),
        Diagonal(weight * torch.rsqrt(square + module.norm.variance_epsilon), shape, "norm"),
        scan,
        *masked(mask, shape, u),
        Diagonal(ratio[..., 2 * per_head :], shape, "activation"),
    )

    def project(y: Tensor) -> Tensor:
        return run(module.out_proj, y.flatten(2))

    return LinearMixer(values, operator, project, mask, _branch_scale(call.block))


def _padding_reads(module: Any) -> bool:
    """Whether padded tokens, which none reads, read others: in transformers 4 they do."""
    return "cache_position" in inspect.signature(type(module).forward).parameters


def _branch_scale(block: Any) -> float:
    if not hasattr(block, "attn_alpha_factor"):  # the mixer stands alone
        return 1.0
    return float(block.attn_beta_factor / block.attn_alpha_factor)
