"""RWKV-6 and RWKV-7 in fla; the equations of RWKV-7 are in :mod:`..rwkv`.

RWKV-6 is

    r, w, k, v, g = maps of h mixed with the previous token's h, each by its own mu(h)
    alpha_h[i, j] = r_h[i] . (product of exp(-exp(w_h)) over j+1..i-1) k_h[j],   j < i
    alpha_h[i, i] = r_h[i] . (bonus_h k_h[i])
    y = SiLU(g) GroupNorm(alpha v)                        output = o_proj(y)

Frozen: r, w, k, the norm's statistics and the gate.  As in RWKV-4, the values are the inputs v of
alpha, so a token's value contains a part of the token before it.  The norm subtracts each head's
mean, so it mixes the channels of a head; its bias is a constant term of the output.

The first layer of RWKV-7 also returns its values, and the model passes them to later layers.  The
values of padded tokens are zero, but these tokens still decay and erase the state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...operators import VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, frozen, linear, run, unit_vectors, zeroed
from ..path import Path
from ..rwkv import (
    delta_to_previous,
    gate_and_project,
    log_decay,
    mix_in_first_values,
    mix_with_previous,
    scan_and_norm,
    unit_vectors_by_head,
)
from .common import input_and_mask

#: Index of the first layer's values in the arguments and in the output of a layer of RWKV-7.
_V_FIRST_ARGUMENT, _V_FIRST_OUTPUT = 5, 3


def fla_rwkv6(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's RWKV6Attention: linear attention that decays at padded tokens, too."""
    hidden, mask = input_and_mask(module, call)
    hidden = zeroed(hidden, mask)
    delta = delta_to_previous(hidden)
    r, w, k, v, g = (
        run(getattr(module, f"{name}_proj").linear, hidden + delta * mu)
        for name, mu in zip("rwkvg", _previous_weights(module, hidden, delta), strict=True)
    )
    heads, norm = module.num_heads, module.g_norm
    path = Path(v, mask, heads).silence()
    r, k, log_decays = (as_heads(x, heads) for x in (r, k, -torch.exp(w)))
    path.scan(VectorDecayHeads(r, k, log_decays, path.shape.per_head, frozen(module.bonus, r)))
    path.layer_norm(norm.weight, norm.bias, norm.eps)
    return path.gate(g, module.gate_fn).to(module.o_proj)


def _previous_weights(module: Any, hidden: Tensor, delta: Tensor) -> list[Tensor]:
    """Return mu, the previous token's weights in the inputs of r, w, k, v and g, (B, L, E) each."""
    lerp, activation, up = module.x_proj
    rank = module.proj_low_rank_dim
    inner = activation(run(lerp.linear, hidden + delta * lerp.mu.to(hidden)))  # (B, L, 5 rank)
    # the layer uses the raw weight of the last map: one matrix per mu
    weights = up.weight.view(module.hidden_size, 5, rank).unbind(1)
    slices = zip(inner.split(rank, -1), weights, module.x_bias.to(hidden), strict=True)
    return [linear(x, weight, bias) for x, weight, bias in slices]


def fla_rwkv7(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's RWKV7Attention: a delta rule with norm and gate."""
    hidden, mask = input_and_mask(module, call)
    hidden = zeroed(hidden, mask)
    r, w, k, v, a, g = mix_with_previous(module, hidden)
    keys = run(module.k_proj, k)
    values = run(module.v_proj, v)
    is_first = module.layer_idx == 0
    if not is_first:
        first = call.argument("v_first", _V_FIRST_ARGUMENT)
        values = mix_in_first_values(values, first, run(module.v_lora, v))
    w, a = log_decay(run(module.w_lora, w)), torch.sigmoid(run(module.a_lora, a))
    erase = _erasing_keys(module, keys)
    norm, r = module.g_norm, run(module.r_proj, r)
    path = scan_and_norm(module, norm, mask, r=r, w=w, k=keys, v=values, a=a, erase=erase)
    at_rest = run(module.g_lora, torch.zeros_like(g[:1, :1]))  # the gate for zero input
    mixer = gate_and_project(path, run(module.g_lora, g), at_rest, module.o_proj)
    return replace(mixer, passed_on={_V_FIRST_OUTPUT: values}) if is_first else mixer


def _erasing_keys(module: Any, keys: Tensor) -> Tensor:
    """Return erasing keys (B, L, H, N) of length one; a fused norm adds eps to squared lengths."""
    x = keys * module.k_k.to(keys)
    if module.fuse_norm:
        return unit_vectors(as_heads(x, module.num_heads))
    return unit_vectors_by_head(x, module.num_heads)
