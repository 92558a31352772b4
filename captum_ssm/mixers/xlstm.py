"""mLSTM: transformers' xlstm.

    i, f = soft-capped gates        m[t] = max(log sigmoid(f[t]) + m[t-1], i[t]),  m[-1] = 0
    alpha[i, j] = exp(sum of log sigmoid(f) over j+1..i + i[j] - m[i]) q[i] . k[j] / sqrt(N)
    s = alpha v / (max(|alpha 1|, exp(-m)) + eps)
    y = sigmoid(o) (w (s - mean s) / sigma(s) + b)          output = W_o y

with the LayerNorm per head.  Frozen: the gates, q, k, the normaliser, 1 / sigma; the centering of
the LayerNorm is linear and stays.  The model is told of no padding.

The decay is kept relative to the stabiliser m: log sigmoid(f[t]) + m[t-1] - m[t] and i[t] - m[t]
are at most zero, so nothing overflows however large the input gate is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Chain, Diagonal, HeadCentering, ScalarDecayHeads, Shape, ShortConv
from .base import Call, LinearMixer
from .parts.common import as_heads, frozen, run, working_dtype


def mlstm(module: Any, call: Call) -> LinearMixer:
    """transformers' xLSTMLayer, with single and with fused weights."""
    call.refuse_cache("state", position=1)
    hidden = call.argument("x", 0)
    hidden = hidden.to(working_dtype(module, hidden))
    config, heads = module.config, module.config.num_heads
    query, key, values, output_gate, write, forget = _projections(module, hidden)
    shape = Shape(*values.shape)
    log_decay = F.logsigmoid(_soft_cap(forget, config.gate_soft_cap))
    write = _soft_cap(write, config.gate_soft_cap)
    before, after = _stabiliser(log_decay, write)
    decay, scale = log_decay + before - after, (write - after).exp()
    query = query * query.shape[-1] ** -0.5
    rows = ScalarDecayHeads(query, key, decay, scale, 1).apply(torch.ones_like(values[..., :1]))
    normaliser = torch.maximum(rows.abs(), torch.exp(-after)[..., None]) + config.eps
    core = Chain(
        Diagonal(1 / normaliser, shape, "scan"),
        ScalarDecayHeads(query, key, decay, scale, shape.per_head),
    )
    norm = module.multihead_norm
    deviation = (core.apply(values).var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    weight = frozen(norm.weight, values).view(heads, -1, 1)
    bias = None if norm.bias is None else frozen(norm.bias, values).view(1, 1, heads, -1)
    operator = Chain(
        Diagonal(torch.sigmoid(output_gate), shape, "gate", at_rest=0.5),
        ShortConv(weight, shape, bias, component="norm"),  # one tap: the affine part
        Diagonal(1 / deviation, shape, "norm"),
        HeadCentering(shape, values),
        core,
    )
    return LinearMixer(values, operator, lambda y: run(module.out_proj, y.flatten(2)))


def _projections(module: Any, hidden: Tensor) -> list[Tensor]:
    """Query, key, value and output gate (B, L, H, .), input and forget gate (B, L, H)."""
    heads = module.config.num_heads
    if module.config.weight_mode == "fused":
        sizes = [module.qk_dim, module.qk_dim, module.v_dim, module.v_dim]
        wide = list(torch.split(run(module.qkv_opreact, hidden), sizes, -1))
        gates = list(torch.split(run(module.ifgate_preact, hidden), heads, -1))
    else:
        wide = [run(p, hidden) for p in (module.q, module.k, module.v, module.ogate_preact)]
        gates = [run(p, hidden) for p in (module.igate_preact, module.fgate_preact)]
    return [*(as_heads(x, heads) for x in wide), *gates]


def _soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _stabiliser(log_decay: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """m before and after every token, (B, L, H)."""
    after = torch.empty_like(write)
    m = torch.zeros_like(write[:, 0])
    for t in range(write.shape[1]):
        m = torch.maximum(log_decay[:, t] + m, write[:, t])
        after[:, t] = m
    return F.pad(after, (0, 0, 1, -1)), after
