"""sLSTM: the package xlstm, in the blocks of xLSTMLMModel.

    i, f = maps of SiLU(conv(h)), z, o = maps of h, all with biases; of each head R y[t-1] is added
    n[t] = sigmoid(f) n[t-1] + exp(i)
    c[t] = sigmoid(f) c[t-1] + exp(i) tanh(z)        y[t] = sigmoid(o) c[t] / n[t]
    output = w (y - mean y) / sigma(y)

with the LayerNorm per head.  Frozen: the gates with the feedback that enters them, the normalizer
n, the ratio tanh(z) / z, and 1 / sigma.  The values are z, to which R y[t-1] is added: the outputs
are fed back.  The model gets no mask of padding.

The state is kept relative to its normalizer: of c / n a token keeps sigmoid(f) n[t-1] / n[t] and
takes exp(i) / n[t] tanh(z), which add up to one, so nothing overflows.  The cell may be that of an
ordinary LSTM (function="lstm"), where exp(i) is sigmoid(i) and y[t] = sigmoid(o) tanh(c[t]): its
state is kept relative to c / tanh(c).

The package's CUDA kernel computes in the dtype of its configuration, bfloat16 by default, whatever
that of the model is; an operator is refused for the difference unless that is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Chain, Diagonal, FeedbackRecurrence, HeadCentering, Shape
from ..operators.kernels.arithmetic import full_precision, unseen
from .base import Call, LinearMixer
from .parts.common import activation_ratio, as_heads, causal_conv, frozen, run, working_dtype
from .xlstm import head_norm


def xlstm_slstm(module: Any, call: Call) -> LinearMixer:
    """The package's sLSTMLayer, by either backend."""
    call.refuse_cache("conv_state", position=1)
    call.refuse_cache("slstm_state", position=2)
    hidden = call.argument("x", 0)
    hidden = hidden.to(working_dtype(module, hidden))
    cell, heads = module.slstm_cell, module.config.num_heads
    convolved = hidden
    if module.config.conv1d_kernel_size > 0:
        channels = as_heads(hidden)
        _, u = causal_conv(module.conv1d.conv, channels, None, Shape(*channels.shape))
        convolved = F.silu(u.squeeze(-1))
    # the layer calls its projections of the input and the forget gate by each other's names
    entering = [run(module.fgate, convolved), run(module.igate, convolved)]
    entering += [run(module.zgate, hidden), run(module.ogate, hidden)]
    bias = frozen(cell._bias_int2ext(cell._bias_), hidden)  # (H, 4, P)
    kernel = frozen(cell._recurrent_kernel_int2ext(cell._recurrent_kernel_), hidden)
    i, f, z, o = (as_heads(x, heads) + b for x, b in zip(entering, bias.unbind(1), strict=True))
    ordinary = module.config.function == "lstm"
    before, after, fed = _run(torch.stack([i, f, z, o], 2), kernel, ordinary)
    fed_i, fed_f, fed_z, fed_o = fed.unbind(2)
    ratio = activation_ratio(torch.tanh, "tanh", z + fed_z)
    log_write = F.logsigmoid(i + fed_i) if ordinary else i + fed_i
    core = FeedbackRecurrence(
        torch.exp(F.logsigmoid(f + fed_f) + (after - before)),
        torch.exp(log_write + after) * ratio,
        torch.sigmoid(o + fed_o),
        kernel[:, :, 2].mT,
        at_rest=0.5,
    )
    shape = Shape(*z.shape)
    operator = Chain(
        Diagonal(head_norm(module.group_norm, core.apply(z)), shape, "norm"),
        HeadCentering(shape, z),
        core,
    )
    return LinearMixer(z, operator, lambda y: y.flatten(2))


@torch.no_grad()
def _run(entering: Tensor, kernel: Tensor, ordinary: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run the cell, token after token.

    Args:
        entering: inputs of i, f, z and o without the feedback, (B, L, 4, H, P).
        kernel: R, (H, P, 4, P).
        ordinary: whether the cell is that of an ordinary LSTM.

    Returns:
        The logarithm of the state's scale before and after each token, (B, L, H, P), and the
        feedback R y[t-1], (B, L, 4, H, P).
    """
    fed = torch.zeros_like(entering)
    scales = torch.zeros_like(entering[:, :, 0])
    with unseen(), full_precision(entering.device):
        state = output = torch.zeros_like(entering[:, 0, 0])
        log_n = torch.full_like(state, -torch.inf)
        for t in range(entering.shape[1]):
            fed[:, t] = torch.einsum("bhp,hpgq->bghq", output, kernel)
            i, f, z, o = (entering[:, t] + fed[:, t]).unbind(1)
            if ordinary:
                state = torch.sigmoid(f) * state + torch.sigmoid(i) * torch.tanh(z)
                ratio = activation_ratio(torch.tanh, "tanh", state)
                output, scales[:, t] = torch.sigmoid(o) * ratio * state, ratio.log()
            else:
                kept = F.logsigmoid(f) + log_n
                log_n = torch.logaddexp(kept, i)
                state = (kept - log_n).exp() * state + (i - log_n).exp() * torch.tanh(z)
                output, scales[:, t] = torch.sigmoid(o) * state, -log_n
    # before the first token there is no state: any scale will do
    return torch.cat([scales[:, :1], scales[:, :-1]], 1), scales, fed
