"""Hyena and StripedHyena 2 (Evo 2): gates around convolutions of any length.

    x0, x1, v = conv(in_proj(u))        y = x0 (h * + b) x1 v          output = out_proj(y)

Here conv is a short convolution, h are the long filters and b is a weight for each channel.  The
values are v before conv; the gates x0 and x1 after conv are frozen.  Hyena of a higher order has
more pairs of a gate and a filter.

In StripedHyena the filter h is short and explicit (se), of medium length (mr), or a sum of
exponentials as long as the sequence (li); se has no b.  The projections are separate modules, and
some layers are attention.
"""

from __future__ import annotations

from typing import Any

import torch

from ..operators import LongConv, Operator, ShortConv
from .base import Call, LinearMixer
from .parts.common import frozen, mixer_input, run
from .parts.softmax import seen_pairs
from .path import Path

#: Largest number of taps of a ShortConv; for longer filters Fourier transforms are faster.
_SHORT_CONV_TAPS = 16


def hyena(module: Any, call: Call) -> LinearMixer:
    """Linearize HyenaOperator in captum_ssm.models.dna: long convolutions between gates."""
    path = Path(run(module.in_proj, mixer_input(module, call))).conv(module.short_filter)
    width = path.shape.heads // (module.order + 1)
    last_gate, *gates, _ = torch.split(path.now, width, 2)  # x0, x1, ..., v
    path = path.narrow(-width, width, width)
    filters = module.filter_fn
    kernels = torch.split(filters.kernel(path.shape.tokens).detach().to(last_gate), width)
    biases = torch.split(frozen(filters.bias, last_gate), width)
    for gate, kernel, bias in zip(reversed(gates), kernels, biases, strict=True):  # inner first
        path.scale(gate, "gate").scan(LongConv(kernel[:, None], path.shape), skip=bias)
    return path.scale(last_gate, "gate").to(module.out_proj)


def cascade(module: Any, call: Call) -> LinearMixer:
    """Linearize HyenaCascade in captum_ssm.models.dna: y = x0 (h * + b) x1 v, with b = D."""
    projected = torch.unflatten(mixer_input(module, call), -1, (-1, 3))  # x0, x1 and v alternate
    taps = module.short_filter_weight.to(projected).flip(-1)[:, 0]  # (3 E, K), by lag
    taps = torch.unflatten(taps, 0, (-1, 3))
    paths = [Path(x) for x in projected.unbind(-1)]
    for convolved, weight in zip(paths, taps.unbind(1), strict=True):
        convolved.then(ShortConv(weight[:, None], convolved.shape))
    outer_gate, inner_gate, path = paths
    kernel = module.kernel(path.shape.tokens).detach().to(taps)[:, None]  # (E, 1, K)
    core: Operator = LongConv(kernel, path.shape)
    if kernel.shape[-1] <= _SHORT_CONV_TAPS:
        core = ShortConv(kernel, path.shape, component="scan")  # not "conv", as by default
    path.scale(inner_gate.now, "gate").scan(core, skip=module.D)
    # the output projection is a module outside of the mixer
    return path.scale(outer_gate.now, "gate").to(lambda y: y)


def attention(module: Any, call: Call) -> LinearMixer:
    """Linearize StripedAttention in captum_ssm.models.dna: causal softmax attention."""
    hidden = mixer_input(module, call)
    query, key, values = module.parts(run(module.Wqkv, hidden))
    pairs = seen_pairs(hidden.shape[1], hidden.device)
    path = Path(values).attend(query, key, values.shape[-1] ** -0.5, pairs)
    return path.to(module.out_proj)
