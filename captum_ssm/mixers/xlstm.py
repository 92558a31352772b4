"""mLSTM in transformers' xlstm and in the package xlstm, and sLSTM in the package.

    i, f = soft-capped gates        m[t] = max(log sigmoid(f[t]) + m[t-1], i[t])
    alpha[i, j] = exp(sum of log sigmoid(f) over j+1..i + i[j] - m[i]) q[i] . k[j] / sqrt(N)
    s = alpha v / (max(|alpha 1|, exp(-m)) + eps)
    y = sigmoid(o) (w (s - mean s) / sigma(s) + b)          output = W_o y

Here m[-1] = 0, and the LayerNorm is per head.  Frozen: the gates, q, k, the normalizer and
1 / sigma; the centering of the LayerNorm stays linear.  The model takes no padding mask.

The blocks of xLSTMLMModel have a convolution, and a learned skip adds its output after the cell:

    x, z = W_up h        u = conv(x)        q, k = maps of SiLU(u)        v = a map of x
    y = SiLU(z) (w (s - mean s) / sigma(s) + skip SiLU(u))                output = W_down y

Gates have no cap, and m[0] = i[0].  The mixer's values are v and x on separate heads, which are
added only after the gate.

Decays are stored relative to the stabilizer m.  Then log sigmoid(f[t]) + m[t-1] - m[t] and
i[t] - m[t] are at most zero, so no exponential overflows for any size of the input gate.

The sLSTM layers of xLSTMLMModel compute

    i, f = maps of SiLU(conv(h)), z, o = maps of h, all with biases; of each head R y[t-1] is added
    n[t] = sigmoid(f) n[t-1] + exp(i)
    c[t] = sigmoid(f) c[t-1] + exp(i) tanh(z)        y[t] = sigmoid(o) c[t] / n[t]
    output = w (y - mean y) / sigma(y)

The LayerNorm is per head.  Frozen: the gates with their feedback terms, the normalizer n, the ratio
tanh(z) / z, and 1 / sigma.  The values are z, to which the feedback R y[t-1] is added.  The model
takes no padding mask.

The state is stored relative to its normalizer, as c / n.  A step multiplies c / n by
sigmoid(f) n[t-1] / n[t] and adds exp(i) / n[t] tanh(z).  The factors sum to one, so no value
overflows.  With function="lstm" the cell is an ordinary LSTM: exp(i) becomes sigmoid(i) and
y[t] = sigmoid(o) tanh(c[t]); its state is stored relative to c / tanh(c).

The package's CUDA kernel computes in the dtype of its configuration, bfloat16 by default, not in
the model's dtype.  Unless that dtype is float32, the check of operators fails.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import Chain, DirectSum, FeedbackRecurrence, HeadCentering, ScalarDecayHeads
from ..operators.kernels.arithmetic import full_precision, unseen
from .base import Call, LinearMixer
from .parts.common import activation_ratio, as_heads, frozen, mixer_input, run
from .path import Path

#: Constant that the cell of xLSTMLMModel adds to the normalizer.
_EPS = 1e-6


def mlstm(module: Any, call: Call) -> LinearMixer:
    """Linearize an mLSTM layer of transformers or xLSTMLarge, fused or not."""
    call.refuse_cache("state", position=1)
    hidden, config = mixer_input(module, call, "x"), module.config
    backend = getattr(config, "mlstm_backend", config)
    if "siging" in str(backend.chunkwise_kernel):
        raise UnsupportedMixerError(
            f"{type(module).__name__} with chunkwise_kernel={backend.chunkwise_kernel!r} has a "
            "sigmoid as its input gate, which is not supported. Use a chunkwise_kernel without "
            "'siging' in its name."
        )
    query, key, values, z, write, forget = _projections(module, hidden)
    write, forget = (_soft_cap(x, config.gate_soft_cap) for x in (write, forget))
    path = _mlstm_scan(Path(values), query, key, write, forget, backend.eps, start=0.0)
    norm = module.multihead_norm
    path.layer_norm(norm.weight, norm.bias, norm.eps)
    return path.gate(z, torch.sigmoid).to(module.out_proj)


def xlstm_mlstm(module: Any, call: Call) -> LinearMixer:
    """Linearize the package's mLSTMLayer in xLSTMBlockStack and xLSTMLMModel."""
    cell, heads = module.mlstm_cell, module.config.num_heads
    x, z = run(module.proj_up, mixer_input(module, call, "x")).chunk(2, -1)
    skip_path = Path(x, heads=heads).conv(module.conv1d.conv).act(live=True)
    query, key = (run(p, skip_path.now.flatten(2)) for p in (module.q_proj, module.k_proj))
    value = run(module.v_proj, x)
    gates = torch.cat([query, key, value], -1)
    write, forget = run(cell.igate, gates), run(cell.fgate, gates)
    query, key = as_heads(query, heads), as_heads(key, heads)
    cell_path = _mlstm_scan(Path(value, heads=heads), query, key, write, forget, _EPS, -torch.inf)
    scale = _head_norm(cell.outnorm, cell_path.now)
    skip_path.scale(frozen(module.learnable_skip, x).view(1, 1, -1), "skip")
    path = Path(torch.cat([value, x], -1), heads=2 * heads)
    # the norm applies only to the cell's heads, which are the first
    centered = torch.cat([scale.new_ones(heads), scale.new_zeros(heads)])
    path.then(
        DirectSum(Chain(*cell_path.parts), Chain(*skip_path.parts)),
        HeadCentering(path.shape, scale, centered=centered),
    )
    path.scale(torch.cat([scale, torch.ones_like(scale)], 2), "norm").gate(torch.cat([z, z], -1))

    def project(y: Tensor) -> Tensor:
        cell, skip = y.chunk(2, -1)
        return run(module.proj_down, cell + skip)

    return path.to(project)


def _head_norm(norm: Any, x: Tensor) -> Tensor:
    """Return weight / sigma(x), the frozen scale of a MultiHeadLayerNorm, for x (B, L, H, P)."""
    scale = torch.rsqrt(x.var(-1, keepdim=True, correction=0) + norm.eps).expand_as(x)
    weight = norm.weight_proxy
    return scale if weight is None else scale * frozen(weight, x).view(x.shape[2:])


def _mlstm_scan(
    path: Path, query: Tensor, key: Tensor, write: Tensor, forget: Tensor, eps: float, start: float
) -> Path:
    """Apply the normalized recurrence of mLSTM: s = alpha v / (max(|alpha 1|, exp(-m)) + eps).

    Args:
        path: the values, as a :class:`.Path`.
        query, key: queries and keys (B, L, H, N).
        write, forget: pre-activations of the input gate and the forget gate (B, L, H).
        eps: number added to the normalizer.
        start: stabilizer before the first token.
    """
    log_decay = F.logsigmoid(forget)
    m_before, m_after = _stabilizer(log_decay, write, start)
    # relative to the stabilizer, so that no exponential overflows
    relative_log_decay, scale = log_decay + m_before - m_after, (write - m_after).exp()
    query = query * query.shape[-1] ** -0.5
    ones = torch.ones_like(query[..., :1])
    row_sums = ScalarDecayHeads(query, key, relative_log_decay, scale, 1).apply(ones)
    normalizer = torch.maximum(row_sums.abs(), torch.exp(-m_after)[..., None]) + eps
    path.scan(ScalarDecayHeads(query, key, relative_log_decay, scale, path.shape.per_head))
    return path.scale(1 / normalizer, "scan")


def _projections(module: Any, hidden: Tensor) -> list[Tensor]:
    """Return q, k, v, and the pre-activations of output, input and forget gate, by head."""
    heads = module.config.num_heads
    if module.config.weight_mode == "fused":
        sizes = [module.qk_dim, module.qk_dim, module.v_dim, module.v_dim]
        vectors = list(torch.split(run(module.qkv_opreact, hidden), sizes, -1))
        gates = list(torch.split(run(module.ifgate_preact, hidden), heads, -1))
    else:
        vectors = [run(p, hidden) for p in (module.q, module.k, module.v, module.ogate_preact)]
        gates = [run(p, hidden) for p in (module.igate_preact, module.fgate_preact)]
    return [*(as_heads(x, heads) for x in vectors), *gates]


def _soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _stabilizer(log_decay: Tensor, write: Tensor, start: float) -> tuple[Tensor, Tensor]:
    """Return m[t-1] and m[t] = max(log_decay[t] + m[t-1], write[t]), each (B, L, H).

    The recurrence begins with m[-1] = start.  The first returned m[t-1] is m[0] instead, because
    start may be infinite, and the first token's decay acts on an empty state.
    """
    m_after = torch.empty_like(write)
    m = torch.full_like(write[:, 0], start)
    for t in range(write.shape[1]):
        m = torch.maximum(log_decay[:, t] + m, write[:, t])
        m_after[:, t] = m
    return torch.cat([m_after[:, :1], m_after[:, :-1]], 1), m_after


def xlstm_slstm(module: Any, call: Call) -> LinearMixer:
    """Linearize the package's sLSTMLayer, for both backends."""
    call.refuse_cache("conv_state", position=1)
    call.refuse_cache("slstm_state", position=2)
    hidden = convolved = mixer_input(module, call, "x")
    cell, heads = module.slstm_cell, module.config.num_heads
    if module.config.conv1d_kernel_size > 0:
        convolved = F.silu(Path(hidden).conv(module.conv1d.conv).now.squeeze(-1))
    # the layer calls its projections of the input and the forget gate by each other's names
    inputs = [run(module.fgate, convolved), run(module.igate, convolved)]
    inputs += [run(module.zgate, hidden), run(module.ogate, hidden)]
    bias = frozen(cell._bias_int2ext(cell._bias_), hidden)  # (H, 4, P)
    kernel = frozen(cell._recurrent_kernel_int2ext(cell._recurrent_kernel_), hidden)
    i, f, z, o = (as_heads(x, heads) + b for x, b in zip(inputs, bias.unbind(1), strict=True))
    is_lstm = module.config.function == "lstm"
    log_before, log_after, feedback = _run_cell(torch.stack([i, f, z, o], 2), kernel, is_lstm)
    fed_i, fed_f, fed_z, fed_o = feedback.unbind(2)
    ratio = activation_ratio(torch.tanh, "tanh", z + fed_z)
    log_write = F.logsigmoid(i + fed_i) if is_lstm else i + fed_i
    core = FeedbackRecurrence(
        decay=torch.exp(F.logsigmoid(f + fed_f) + (log_after - log_before)),
        write=torch.exp(log_write + log_after) * ratio,
        gate=torch.sigmoid(o + fed_o),
        feedback=kernel[:, :, 2].mT,  # to z
        at_rest=0.5,
    )
    path = Path(z).scan(core)
    scale = _head_norm(module.group_norm, path.now)
    path.then(HeadCentering(path.shape, z)).scale(scale, "norm")
    return path.to(lambda y: y)


@torch.no_grad()
def _run_cell(inputs: Tensor, kernel: Tensor, is_lstm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run the sLSTM cell token by token, to get its scales and feedback.

    Args:
        inputs: pre-activations of i, f, z and o without the feedback (B, L, 4, H, P).
        kernel: feedback matrices R (H, P, 4, P).
        is_lstm: whether the cell is an ordinary LSTM.

    Returns:
        The logarithm of the state's scale before and after each token, (B, L, H, P): 1 / n, or
        tanh(c) / c of an LSTM; and the feedback R y[t-1], (B, L, 4, H, P).
    """
    feedback = torch.zeros_like(inputs)
    scales = torch.zeros_like(inputs[:, :, 0])
    with unseen(), full_precision(inputs.device):
        state = output = torch.zeros_like(inputs[:, 0, 0])
        log_n = torch.full_like(state, -torch.inf)
        for t in range(inputs.shape[1]):
            feedback[:, t] = torch.einsum("bhp,hpgq->bghq", output, kernel)
            i, f, z, o = (inputs[:, t] + feedback[:, t]).unbind(1)
            if is_lstm:
                state = torch.sigmoid(f) * state + torch.sigmoid(i) * torch.tanh(z)
                ratio = activation_ratio(torch.tanh, "tanh", state)
                output, scales[:, t] = torch.sigmoid(o) * ratio * state, ratio.log()
            else:
                log_kept = F.logsigmoid(f) + log_n
                log_n = torch.logaddexp(log_kept, i)
                state = (log_kept - log_n).exp() * state + (i - log_n).exp() * torch.tanh(z)
                output, scales[:, t] = torch.sigmoid(o) * state, -log_n
    # before the first token the state is zero, so any scale is right
    return torch.cat([scales[:, :1], scales[:, :-1]], 1), scales, feedback
