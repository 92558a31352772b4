"""Softmax attention of flash-linear-attention's hybrids: fla's Attention.

    q, k = rotate(q), rotate(k)      alpha = softmax(q k^T / sqrt(N)), causal, in a window if it has
    output = o_proj(alpha v)         one

The layer hands over to FlashAttention, so the operator is recomputed.  Frozen: the probabilities.
"""

from __future__ import annotations

from typing import Any

from ..base import Call, LinearMixer
from ..parts.common import as_heads, run
from ..parts.softmax import seen_pairs, softmax_attention
from .common import entering, rotated


def fla_attention(module: Any, call: Call) -> LinearMixer:
    """fla's Attention, whose window counts real tokens, and its rotations all of them."""
    hidden, mask = entering(module, call)
    q = as_heads(run(module.q_proj, hidden), module.num_heads)
    k, v = (as_heads(run(p, hidden), module.num_kv_heads) for p in (module.k_proj, module.v_proj))
    if module.qk_norm:
        q, k = run(module.q_norm, q), run(module.k_norm, k)
    q, k = (rotated(module.rotary, None, x) for x in (q, k))
    k, v = (x.repeat_interleave(module.num_kv_groups, 2) for x in (k, v))
    if mask is None:
        pairs = seen_pairs(hidden.shape[1], hidden.device, window=module.window_size)
    else:
        position = mask.cumsum(1)
        distance = position[:, :, None] - position[:, None]  # (B, L, L)
        pairs = (distance >= 0) & mask[:, :, None] & mask[:, None]
        if module.window_size is not None:
            pairs &= distance < module.window_size
        pairs = pairs[:, None]
    operator, read = softmax_attention(
        q.transpose(1, 2), k.transpose(1, 2), v, module.head_dim**-0.5, pairs
    )
    return LinearMixer(v, operator, lambda y: run(module.o_proj, y.flatten(2)), read)
