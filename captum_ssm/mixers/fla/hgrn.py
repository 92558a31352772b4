"""HGRN: fla's HGRNAttention.

    f = sigmoid(f_proj h), above the layer's lower bound        x = (1 - f) SiLU(i_proj h)
    s[t] = f[t] s[t-1] + x[t]
    y = SiLU(g) RMSNorm(s)                                      output = o_proj(y)

f and i each pass a short convolution if the layer has them.  Frozen: f, the ratio SiLU(i) / i,
the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import Chain, Diagonal, ElementwiseRecurrence, Shape
from ..base import Call, LinearMixer
from ..parts.common import as_heads, run
from .common import convolved, entering, frozen_rms_norm, value_stream, zeroed


def fla_hgrn(module: Any, call: Call) -> LinearMixer:
    """fla's HGRNAttention; padded tokens write nothing, but the state decays over them."""
    hidden, mask = entering(module, call)
    f = run(module.f_proj, hidden)
    if module.use_short_conv:
        f = convolved(module.f_conv1d, zeroed(f, mask))
    decay = log_forget(module, f, call).exp()

    conv = module.i_conv1d if module.use_short_conv else None
    values, inner = value_stream(run(module.i_proj, hidden), conv, mask, 1, silu=True)
    shape = Shape(*values.shape)
    core = Chain(ElementwiseRecurrence(decay), Diagonal(as_heads(1 - decay), shape, "scan"), *inner)
    norm = module.g_norm
    operator = Chain(
        Diagonal(as_heads(F.silu(run(module.g_proj, hidden))), shape, "gate"),
        frozen_rms_norm(core.affine(values), norm.weight, norm.eps, whole=True),
        core,
    )
    return LinearMixer(values, operator, lambda y: run(module.o_proj, y.flatten(2)), mask)


def log_forget(module: Any, f: Tensor, call: Call) -> Tensor:
    """log of the forget gate; the model passes the lower bound to each layer but the first."""
    log_f = F.logsigmoid(f)
    bound = call.argument("lower_bound", 5)
    if bound is None or not module.layer_idx > 0:
        return log_f
    bound = bound.to(f)
    return torch.logaddexp(bound.log(), torch.log1p(-bound) + log_f)
