"""mLSTM: transformers' xlstm, and both kinds of layers of the package xlstm.

    i, f = soft-capped gates        m[t] = max(log sigmoid(f[t]) + m[t-1], i[t])
    alpha[i, j] = exp(sum of log sigmoid(f) over j+1..i + i[j] - m[i]) q[i] . k[j] / sqrt(N)
    s = alpha v / (max(|alpha 1|, exp(-m)) + eps)
    y = sigmoid(o) (w (s - mean s) / sigma(s) + b)          output = W_o y

with m[-1] = 0 and the LayerNorm per head.  Frozen: the gates, q, k, the normalizer, 1 / sigma; the
centering of the LayerNorm is linear and stays.  The model gets no mask of padding.

The blocks of xLSTMLMModel have a convolution, whose output a learnt skip hands on past the cell:

    x, z = W_up h        u = conv(x)        q, k = maps of SiLU(u)        v = a map of x
    y = SiLU(z) (w (s - mean s) / sigma(s) + skip SiLU(u))                output = W_down y

without a cap on gates, and m[0] = i[0].  Their values are v and x, each on heads of its own, which
are added only behind the gate.

The decay is kept relative to the stabilizer m: log sigmoid(f[t]) + m[t-1] - m[t] and i[t] - m[t]
are at most zero, so nothing overflows however large the input gate is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import Chain, Diagonal, HeadCentering, ScalarDecayHeads, Shape, ShortConv
from ..operators.combine import DirectSum
from .base import Call, LinearMixer
from .parts.common import as_heads, causal_conv, frozen, run, working_dtype

#: Added to the normalizer by the cell of xLSTMLMModel.
_EPS = 1e-6


def mlstm(module: Any, call: Call) -> LinearMixer:
    """transformers' xLSTMLayer and that of xLSTMLarge, with single and with fused weights."""
    call.refuse_cache("state", position=1)
    hidden = call.argument("x", 0)
    hidden = hidden.to(working_dtype(module, hidden))
    config, heads = module.config, module.config.num_heads
    backend = getattr(config, "mlstm_backend", config)
    if "siging" in str(backend.chunkwise_kernel):
        raise UnsupportedMixerError(
            f"{type(module).__name__} with chunkwise_kernel={backend.chunkwise_kernel!r}: its "
            "input gate is a sigmoid, which has no adapter. Use a kernel without 'siging'."
        )
    query, key, values, output_gate, write, forget = _projections(module, hidden)
    shape = Shape(*values.shape)
    write, forget = (_soft_cap(x, config.gate_soft_cap) for x in (write, forget))
    core = _core(query, key, write, forget, backend.eps, shape, 0.0)
    norm = module.multihead_norm
    weight = frozen(norm.weight, values).view(heads, -1, 1)
    bias = None if norm.bias is None else frozen(norm.bias, values).view(1, 1, heads, -1)
    operator = Chain(
        Diagonal(torch.sigmoid(output_gate), shape, "gate", at_rest=0.5),
        ShortConv(weight, shape, bias, component="norm"),  # one tap: the affine part
        Diagonal(1 / head_deviation(core.apply(values), norm.eps), shape, "norm"),
        HeadCentering(shape, values),
        core,
    )
    return LinearMixer(values, operator, lambda y: run(module.out_proj, y.flatten(2)))


def xlstm_mlstm(module: Any, call: Call) -> LinearMixer:
    """The package's mLSTMLayer of xLSTMBlockStack and xLSTMLMModel."""
    hidden = call.argument("x", 0)
    hidden = hidden.to(working_dtype(module, hidden))
    cell, heads = module.mlstm_cell, module.config.num_heads
    x, z = run(module.proj_up, hidden).chunk(2, -1)
    x_heads = as_heads(x, heads)
    shape = Shape(*x_heads.shape)
    conv, u = causal_conv(module.conv1d.conv, x_heads, None, shape)
    ratio = torch.sigmoid(u)
    activated = (u * ratio).flatten(2)
    query, key = (run(p, activated) for p in (module.q_proj, module.k_proj))
    value = run(module.v_proj, x)
    write, forget = (
        run(gate, torch.cat([query, key, value], -1)) for gate in (cell.igate, cell.fgate)
    )
    query, key, value = (as_heads(each, heads) for each in (query, key, value))
    core = _core(query, key, write, forget, _EPS, shape, -torch.inf)
    scale = head_norm(cell.outnorm, core.apply(value))
    skip = frozen(module.learnable_skip, value).view(1, 1, heads, -1)
    by_skip = Chain(Diagonal(skip, shape, "skip"), Diagonal(ratio, shape, "activation"), conv)
    both = shape._replace(heads=2 * heads)
    gate = as_heads(F.silu(z), heads)
    operator = Chain(
        Diagonal(torch.cat([gate, gate], 2), both, "gate"),
        Diagonal(torch.cat([scale, torch.ones_like(scale)], 2), both, "norm"),
        HeadCentering(both, value, centred=_first(heads, value)),
        DirectSum(core, by_skip),
    )

    def project(y: Tensor) -> Tensor:
        by_cell, past_it = y.chunk(2, 2)
        return run(module.proj_down, (by_cell + past_it).flatten(2))

    return LinearMixer(torch.cat([value, x_heads], 2), operator, project)


def head_norm(norm: Any, x: Tensor) -> Tensor:
    """Frozen factors of the package's MultiHeadLayerNorm on centered ``x`` (B, L, H, P)."""
    scale = 1 / head_deviation(x, norm.eps)
    weight = norm.weight_proxy
    return scale.expand_as(x) if weight is None else scale * frozen(weight, x).view(x.shape[2:])


def head_deviation(x: Tensor, eps: float) -> Tensor:
    """The denominator of a LayerNorm of each head, (B, L, H, 1)."""
    return (x.var(-1, keepdim=True, correction=0) + eps).sqrt()


def _first(heads: int, like: Tensor) -> Tensor:
    """A vector of 1 for so many heads and 0 for as many more, (2 H,)."""
    return torch.cat([like.new_ones(heads), like.new_zeros(heads)])


def _core(
    query: Tensor,
    key: Tensor,
    write: Tensor,
    forget: Tensor,
    eps: float,
    shape: Shape,
    start: float,
) -> Chain:
    """The normalized recurrence.

    Args:
        query, key: (B, L, H, N).
        write, forget: the inputs of the input and the forget gate (B, L, H).
        eps: added to the normalizer.
        shape: the sizes of the values.
        start: the stabilizer before the first token.
    """
    log_decay = F.logsigmoid(forget)
    before, after = _stabilizer(log_decay, write, start)
    decay, scale = log_decay + before - after, (write - after).exp()
    query = query * query.shape[-1] ** -0.5
    ones = torch.ones_like(query[..., :1])
    rows = ScalarDecayHeads(query, key, decay, scale, 1).apply(ones)
    normalizer = torch.maximum(rows.abs(), torch.exp(-after)[..., None]) + eps
    return Chain(
        Diagonal(1 / normalizer, shape, "scan"),
        ScalarDecayHeads(query, key, decay, scale, shape.per_head),
    )


def _projections(module: Any, hidden: Tensor) -> list[Tensor]:
    """Query, key, value, output gate (B, L, H, .), input and forget gate (B, L, H) of a layer."""
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


def _stabilizer(log_decay: Tensor, write: Tensor, start: float) -> tuple[Tensor, Tensor]:
    """The stabilizer m before and after every token, (B, L, H) each; at the first both are m[0]."""
    after = torch.empty_like(write)
    m = torch.full_like(write[:, 0], start)
    for t in range(write.shape[1]):
        m = torch.maximum(log_decay[:, t] + m, write[:, t])
        after[:, t] = m
    return torch.cat([after[:, :1], after[:, :-1]], 1), after
