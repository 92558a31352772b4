"""Gated slot attention and LightNet of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import (
    Formula,
    conv_parts,
    convolved,
    decayed_scores,
    rms_factors,
)
from torch import Tensor
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 24
# the norms are not told this eps
GSA: dict[str, dict[str, Any]] = {
    "plain": {"norm_eps": 10.0},
    "grouped": {"num_kv_heads": 2, "use_short_conv": True, "conv_bias": True, "scale": 0.5},
    "t2r": {"feature_map": "t2r", "num_slots": 3, "gate_logit_normalizer": 1},
    "relu": {"feature_map": "relu", "elementwise_affine": False, "num_slots": None},
}
LIGHTNET: dict[str, dict[str, Any]] = {
    "plain": {"norm_eps": 10.0},
    "conv": {"use_short_conv": True, "conv_size": 3, "elementwise_affine": False},
    "conv bias": {"use_short_conv": True, "conv_bias": True, "expand_ratio": None, "num_heads": 2},
}
CASES = [
    *(("GatedSlotAttention", case) for case in GSA),
    *(("LightNetAttention", case) for case in LIGHTNET),
]
QUICK = [("GatedSlotAttention", "grouped"), ("LightNetAttention", "plain")]


def make(fla: FLA, kind: str, case: str) -> Any:
    if kind == "GatedSlotAttention":
        options = {"num_heads": 4, "num_slots": 5, **GSA[case]}
    else:
        options = {"expand_ratio": 8, "gate_low_rank_dim": 3, **LIGHTNET[case]}
    return fla.layer(kind, hidden_size=WIDTH, **options)


def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    make = gsa_formula if type(layer).__name__ == "GatedSlotAttention" else lightnet_formula
    return make(layer, hidden, keep)


@torch.no_grad()
def gsa_formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    tokens, heads, groups = hidden.shape[1], layer.num_heads, layer.num_kv_groups
    q_conv, k_conv, v_conv = (getattr(layer, f"{n}_conv1d", None) for n in "qkv")
    q = convolved(q_conv, layer.q_proj(hidden)).unflatten(-1, (heads, -1))
    k = convolved(k_conv, layer.k_proj(hidden)).unflatten(-1, (heads // groups, -1))
    q, k = layer.feature_map(q), layer.feature_map(k).repeat_interleave(groups, 2)
    a = torch.sigmoid(layer.f_proj(hidden)) ** (1 / layer.gate_logit_normalizer)
    a = a.unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2)
    # the slots' keys, token by token
    slots = torch.zeros_like(a)
    state = torch.zeros(a.shape[0], heads, a.shape[3], k.shape[-1], dtype=torch.float64)
    for t in range(tokens):
        new = (1 - a[:, t])[..., None] * k[:, t, :, None]
        state = a[:, t, ..., None] * state + new
        slots[:, t] = (layer.scale * (state * q[:, t, :, None]).sum(-1)).softmax(-1)
    core = decayed_scores(slots, 1 - a, a.log())
    values = layer.v_proj(hidden).unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2)
    conv, bias = conv_parts(v_conv, heads, values.shape[-1], tokens, groups)
    u = fla_checks.oracles.times(conv, values) + bias
    ratio = torch.sigmoid(u)
    if v_conv is not None:  # the convolution has a SiLU of its own
        ratio = ratio * torch.sigmoid(F.silu(u))
    one, norm = torch.ones_like(values), layer.g_norm
    factors = rms_factors(norm.weight, 1e-5, whole=True)
    return Formula(values, conv, bias, ratio, core, factors, one, keep.double(), activated=True)


@torch.no_grad()
def lightnet_formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    tokens, heads = hidden.shape[1], layer.num_heads
    q_conv, k_conv, v_conv = (getattr(layer, f"{n}_conv1d", None) for n in "qkv")
    q = F.silu(convolved(q_conv, layer.q_proj(hidden))).unflatten(-1, (heads, -1))
    weight = convolved(k_conv, layer.k_proj(hidden)).exp().unflatten(-1, (heads, -1))
    # per key channel, a mean of values weighted by exp(k)
    share = torch.einsum("bihn,bjhn->bhijn", q / weight.cumsum(1), weight)
    core = share.sum(-1).tril() / q.shape[-1] ** 0.5
    values = layer.v_proj(hidden).unflatten(-1, (heads, -1))
    conv, bias = conv_parts(v_conv, heads, values.shape[-1], tokens)
    gate = F.silu(layer.g_proj(hidden)).view_as(values)
    factors = rms_factors(layer.g_norm.weight, 1e-6, whole=True)
    one = torch.ones_like(values)
    return Formula(values, conv, bias, one, core, factors, gate, keep.double())


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_contract(fla: FLA, kind: str, case: str) -> None:
    fla_checks.holds(make(fla, kind, case), WIDTH, formula, compacted=True)
