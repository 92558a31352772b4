"""Lightning attention: transformers' minimax.

    q, k, v = mask SiLU(W h)
    S[t] = exp(-slope) S[t-1] + k[t] v[t]^T,      s[t] = q[t] S[t]
    y = sigmoid(W_g h) w s / rms(s)               output = W_o y

The slope is a constant per head, and the norm is over all channels.  Frozen: q, k, the mask, the
ratio SiLU(u) / u, 1 / rms and the gate.

The block normalizes h and computes alpha h + beta output = alpha (h + beta / alpha output).  The
next norm removes the common factor alpha, so ``branch_scale`` is beta / alpha.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..operators import ScalarDecayHeads
from .base import Call, LinearMixer
from .parts.common import as_heads, mixer_input, padding_mask, run, zeroed
from .path import Path


def lightning_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize transformers' MiniMaxLightningAttention: linear attention with fixed decays."""
    call.refuse_cache("past_key_values", position=3)
    hidden = mixer_input(module, call)
    mask = padding_mask(call.argument("attention_mask", 2), hidden)
    u = as_heads(run(module.qkv_proj, hidden), module.num_attention_heads)  # (B, L, H, 3 P)
    query, key, _ = Path(u).act(module.act_fn).now.chunk(3, -1)
    query = query if _keeps_padded_queries(module) else zeroed(query, mask)
    path = Path(u[..., 2 * module.head_dim :], mask).act(module.act_fn).silence()
    slope = module.slope_rate.to(u).view(1, 1, -1)
    log_decay = -slope.expand(path.shape[:3])
    path.scan(ScalarDecayHeads(query, key, log_decay, None, module.head_dim))
    path.rms_norm(module.norm.weight, module.norm.variance_epsilon, groups=1)
    path.gate(run(module.output_gate, hidden), torch.sigmoid)
    return path.to(module.out_proj, branch_scale=_branch_scale(call.block))


def _keeps_padded_queries(module: Any) -> bool:
    """Return True if queries at padded tokens are not zeroed, as in transformers 4."""
    return "cache_position" in inspect.signature(type(module).forward).parameters


def _branch_scale(block: Any) -> float:
    if not hasattr(block, "attn_alpha_factor"):
        return 1.0
    return float(block.attn_beta_factor / block.attn_alpha_factor)
