"""RWKV-6: fla's RWKV6Attention.

    r, w, k, v, g = maps of h mixed with the previous token's h, each by its own mu(h)
    alpha_h[i, j] = r_h[i] . (product of exp(-exp(w_h)) over j+1..i-1) k_h[j],   j < i
    alpha_h[i, i] = r_h[i] . (bonus_h k_h[i])
    y = SiLU(g) GroupNorm(alpha v)                        output = o_proj(y)

Frozen: r, w, k, the norm's statistics and the gate.  As in RWKV-4, the values are the v that
enter alpha, so a token's value holds a part of the token before it: the mixing acts on the
channels of h before the projection, which no convolution per value channel equals.

The norm subtracts each head's mean, so it mixes the channels of a head; its bias counts as bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operators import Chain, Shape, VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import (
    as_heads,
    frozen,
    frozen_group_norm,
    linear,
    masked,
    output_gate,
    run,
)
from .common import entering, zeroed


def fla_rwkv6(module: Any, call: Call) -> LinearMixer:
    """fla's RWKV6Attention; padded tokens write nothing, but the state decays over them."""
    hidden, mask = entering(module, call)
    hidden = zeroed(hidden, mask)
    delta = torch.nn.functional.pad(hidden, (0, 0, 1, -1)) - hidden
    r, w, k, v, g = (
        run(getattr(module, f"{name}_proj").linear, hidden + delta * mu)
        for name, mu in zip("rwkvg", _mixing(module, hidden, delta), strict=True)
    )
    heads = module.num_heads
    values = as_heads(v, heads)
    shape = Shape(*values.shape)
    scan = VectorDecayHeads(
        as_heads(r, heads),
        as_heads(k, heads),
        as_heads(-torch.exp(w), heads),
        shape.per_head,
        frozen(module.bonus, values),
    )
    core = Chain(scan, *masked(mask, shape, values))
    operator = Chain(
        output_gate(module.gate_fn, as_heads(g, heads)),
        *frozen_group_norm(module.g_norm, core.affine(values), shape),
        core,
    )
    return LinearMixer(values, operator, lambda y: run(module.o_proj, y.flatten(2)), mask)


def _mixing(module: Any, hidden: Tensor, delta: Tensor) -> list[Tensor]:
    """mu, how much of the previous token each of r, w, k, v and g takes, each (B, L, E)."""
    lerp, activation, up = module.x_proj
    rank = module.proj_low_rank_dim
    x = activation(run(lerp.linear, hidden + delta * lerp.mu.to(hidden)))
    # the layer reads the last map by its weight: one matrix per mu
    weights = up.weight.view(module.hidden_size, 5, rank).unbind(1)
    parts = zip(x.split(rank, -1), weights, module.x_bias.to(hidden), strict=True)
    return [linear(part, weight, bias) for part, weight, bias in parts]
