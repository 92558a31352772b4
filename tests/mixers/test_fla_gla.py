"""Gated linear attention and HGRN2 of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import (
    EPS,
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
GLA: dict[str, dict[str, Any]] = {
    "plain": {},
    "conv": {"use_short_conv": True, "conv_size": 3, "gate_logit_normalizer": 1},
    "grouped": {"num_kv_heads": 2, "use_short_conv": True, "conv_bias": True, "clamp_min": -0.05},
    "unfused": {"gate_fn": "sigmoid", "feature_map": "relu", "expand_v": 2.0},
    "no gate": {"use_output_gate": False, "elementwise_affine": False, "num_heads": 1},
}
HGRN2: dict[str, dict[str, Any]] = {
    "plain": {},
    "conv": {"use_short_conv": True, "conv_size": 3, "elementwise_affine": False},
    "conv bias": {
        "use_short_conv": True,
        "conv_bias": True,
        "expand_ratio": None,
        "num_heads": 2,
    },
}


def make_gla(fla: FLA, case: str) -> Any:
    options = {"hidden_size": WIDTH, "num_heads": 4, "gate_low_rank_dim": 5, "norm_eps": EPS}
    return fla.layer("GatedLinearAttention", **options | GLA[case])


def make_hgrn2(fla: FLA, case: str) -> Any:
    # the layer's norm is not told this eps
    options = {"hidden_size": WIDTH, "expand_ratio": 6, "norm_eps": 10.0}
    layer = fla.layer("HGRN2Attention", **options | HGRN2[case])
    layer.layer_idx = 1  # the first layer has no lower bound
    return layer


def bound(layer: Any) -> Tensor:
    return torch.linspace(0.01, 0.9, layer.forget_dim)


@torch.no_grad()
def gla_formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    tokens, heads, groups = hidden.shape[1], layer.num_heads, layer.num_kv_groups
    q_conv, k_conv, v_conv = (getattr(layer, f"{n}_conv1d", None) for n in "qkv")
    q = convolved(q_conv, layer.q_proj(hidden)).unflatten(-1, (heads, -1))
    k = convolved(k_conv, layer.k_proj(hidden)).unflatten(-1, (heads // groups, -1))
    if layer.feature_map_fn is not None:
        q, k = F.relu(q), F.relu(k)
    log_decay = torch.log(torch.sigmoid(layer.gk_proj(hidden))) / layer.gate_logit_normalizer
    if layer.clamp_min is not None:
        log_decay = log_decay.clamp_min(layer.clamp_min)
    log_decay = log_decay.unflatten(-1, (heads // groups, -1))
    k, log_decay = (x.repeat_interleave(groups, 2) for x in (k, log_decay))
    core = decayed_scores(q, k, log_decay) / q.shape[-1] ** 0.5
    values = layer.v_proj(hidden).unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2)
    conv, bias = conv_parts(v_conv, heads, values.shape[-1], tokens, groups)
    ratio = torch.ones_like(values)
    if v_conv is not None:
        ratio = torch.sigmoid(fla_checks.oracles.times(conv, values) + bias)
    gate = torch.ones_like(values)
    if layer.use_output_gate:
        g = layer.g_proj(hidden)
        gate = (F.silu(g) if layer.fuse_norm_and_gate else torch.sigmoid(g)).view_as(values)
    norm = layer.g_norm_swish_gate if layer.fuse_norm_and_gate else layer.g_norm
    factors = rms_factors(norm.weight, norm.eps, whole=False)
    return Formula(values, conv, bias, ratio, core, factors, gate, keep.double())


@torch.no_grad()
def hgrn2_formula(layer: Any, hidden: Tensor, keep: Tensor, lower: Tensor | None = None) -> Formula:
    tokens, heads = hidden.shape[1], layer.num_heads
    q_conv, f_conv, i_conv = (getattr(layer, f"{n}_conv1d", None) for n in "qfi")
    q = F.silu(convolved(q_conv, layer.q_proj(hidden)))
    f = torch.sigmoid(convolved(f_conv, layer.f_proj(hidden)))
    if lower is not None:
        f = lower.double() + (1 - lower.double()) * f
    q, f = (x.unflatten(-1, (heads, -1)) for x in (q, f))
    core = decayed_scores(q, 1 - f, f.log()) / q.shape[-1] ** 0.5
    values = layer.i_proj(hidden).unflatten(-1, (heads, -1))
    conv, bias = conv_parts(i_conv, heads, values.shape[-1], tokens)
    one = torch.ones_like(values)
    factors = rms_factors(layer.g_norm.weight, 1e-5, whole=True)
    return Formula(values, conv, bias, one, core, factors, one, keep.double())


@pytest.mark.parametrize("case", GLA)
def test_gla_matrices(fla: FLA, case: str) -> None:
    fla_checks.holds(make_gla(fla, case), WIDTH, gla_formula, compacted=True)


@pytest.mark.parametrize("case", HGRN2)
def test_hgrn2_matrices(fla: FLA, case: str) -> None:
    layer = make_hgrn2(fla, case)
    lower = bound(layer).double()
    fla_checks.holds(
        layer, WIDTH, lambda *a: hgrn2_formula(*a, lower), compacted=True, lower_bound=lower
    )
