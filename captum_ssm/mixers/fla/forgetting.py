"""Softmax attention that forgets: fla's ForgettingAttention.

    alpha_h[i, j] = softmax over j <= i of q[i] . k[j] / sqrt(N) + (the sum of log f over j+1..i)
    f = sigmoid(f_proj h)                     output = o_proj(gate alpha v)

with RMSNorms of q and k per head and the gate, sigmoid(g_proj h), as options.  The window of its
configuration counts in decoding alone.  Frozen: the probabilities and the gate.  Its matrices are
formed, which takes memory that grows with the square of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import Chain, Diagonal, Operator, ScalarDecayHeads, Shape
from ...operators.heads import ScoredHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, masked, rms_norm, run
from .common import entering, zeroed


def fla_forgetting(module: Any, call: Call) -> LinearMixer:
    """fla's ForgettingAttention."""
    hidden, mask = entering(module, call)
    heads, groups = module.num_heads, module.num_kv_groups
    q = _normed(module, "q", hidden, heads) * module.head_dim**-0.5
    k = _normed(module, "k", hidden, module.num_kv_heads).repeat_interleave(groups, 2)
    values = as_heads(run(module.v_proj, hidden), module.num_kv_heads).repeat_interleave(groups, 2)
    forget = zeroed(F.logsigmoid(run(module.f_proj, hidden)), mask)
    shape = Shape(*values.shape)
    reads = ScalarDecayHeads(q, k, torch.zeros_like(forget.detach()), None, shape.per_head)
    operator: list[Operator] = [
        ScoredHeads(reads, forget, shape.per_head, mask),
        *masked(mask, shape, values),
    ]
    if module.use_output_gate:
        gate = as_heads(torch.sigmoid(run(module.g_proj, hidden)), heads)
        operator.insert(0, Diagonal(gate, shape, "gate", at_rest=0.5))
    return LinearMixer(values, Chain(*operator), lambda y: run(module.o_proj, y.flatten(2)), mask)


def _normed(module: Any, name: str, hidden: Tensor, heads: int) -> Tensor:
    """Queries or keys (B, L, H, N)."""
    x = as_heads(run(getattr(module, f"{name}_proj"), hidden), heads)
    if not module.qk_norm:
        return x
    norm = getattr(module, f"{name}_norm")
    normed: Tensor = rms_norm(x, norm.eps) * norm.weight.to(x).view(heads, -1)
    return normed
