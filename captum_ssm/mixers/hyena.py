"""Hyena: gates around convolutions as long as the sequence.

    x0, x1, v = conv(in_proj(u))        y = x0 (h * + b) x1 v          output = out_proj(y)

with conv a short convolution, h the long filters and b a weight for each channel.  Values are v
before conv; frozen are the gates x0 and x1 behind it.  A higher order has more pairs of a gate and
a filter.
"""

from __future__ import annotations

from typing import Any

import torch

from ..operators import Chain, Diagonal, LongConv, Operator, Shape, Sum
from .base import Call, LinearMixer
from .parts.common import as_heads, causal_conv, frozen, run, working_dtype


def hyena(module: Any, call: Call) -> LinearMixer:
    """captum_ssm.models.dna's HyenaOperator."""
    hidden = call.hidden_states
    projected = as_heads(run(module.in_proj, hidden.to(working_dtype(module, hidden))))
    whole = Shape(*projected.shape)  # (B, L, (order + 1) E, 1)
    width = whole.heads // (module.order + 1)
    conv, u = causal_conv(module.short_filter, projected, None, whole)
    values, shape = projected[:, :, -width:], whole._replace(heads=width)
    x, *gates, _ = torch.split(u, width, 2)
    filters = module.filter_fn
    kernels = torch.split(filters.kernel(shape.tokens).detach().to(values), width)
    biases = torch.split(frozen(filters.bias, values), width)
    parts: list[Operator] = [conv.select(range(whole.heads - width, whole.heads))]
    for gate, kernel, bias in zip(reversed(gates), kernels, biases, strict=True):
        skip = Diagonal(bias.view(1, 1, -1, 1), shape, "skip")
        parts += [Diagonal(gate, shape, "gate"), Sum(LongConv(kernel[:, None], shape), skip)]
    operator = Chain(Diagonal(x, shape, "gate"), *reversed(parts))
    return LinearMixer(values, operator, lambda y: run(module.out_proj, y.flatten(2)))
