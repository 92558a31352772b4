"""HGRN of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import EPS, Formula, conv_parts, convolved, record, record_one, rms_factors
from torch import Tensor
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "expanded": {"expand_ratio": 2},
    "conv": {"use_short_conv": True, "conv_size": 3, "elementwise_affine": False},
    "conv bias": {"use_short_conv": True, "conv_bias": True},
}


def make(fla: FLA, case: str) -> Any:
    layer = fla.layer("HGRNAttention", hidden_size=WIDTH, norm_eps=EPS, **OPTIONS[case])
    layer.layer_idx = 1  # the first layer has no lower bound
    return layer


def bound(layer: Any) -> Tensor:
    return torch.linspace(0.01, 0.9, layer.input_dim)


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor, lower: Tensor | None = None) -> Formula:
    keep, tokens = keep.double(), hidden.shape[1]
    f_conv, i_conv = (getattr(layer, f"{n}_conv1d", None) for n in "fi")
    f = layer.f_proj(hidden)
    if f_conv is not None:
        f = convolved(f_conv, f * keep[..., None])
    f = torch.sigmoid(f)
    if lower is not None:
        f = lower.double() + (1 - lower.double()) * f
    width = layer.input_dim
    core = torch.zeros(len(hidden), width, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            core[:, :, i, j] = f[:, j + 1 : i + 1].prod(1) * (1 - f[:, j])
    values = layer.i_proj(hidden)[..., None]
    conv, bias = conv_parts(i_conv, width, 1, tokens)
    u = fla_checks.oracles.times(conv, values * keep[..., None, None]) + bias
    gate = F.silu(layer.g_proj(hidden))[..., None]
    factors = rms_factors(layer.g_norm.weight, layer.g_norm.eps, whole=True)
    return Formula(values, conv, bias, torch.sigmoid(u), core, factors, gate, keep)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_contract(fla: FLA, case: str, bounded: bool) -> None:
    layer = make(fla, case)
    lower = bound(layer).double() if bounded else None
    kwargs = {"lower_bound": lower} if bounded else {}
    fla_checks.holds(layer, WIDTH, lambda *a: formula(*a, lower), compacted=False, **kwargs)


def test_the_first_layer_ignores_the_lower_bound(fla: FLA) -> None:
    layer = make(fla, "plain")
    layer.layer_idx = 0
    hidden = torch.randn(2, 7, WIDTH)
    recorded = record_one(layer, hidden, lower_bound=bound(layer))
    assert recorded.reconstruction_error() <= fla_checks.FLOAT32
    without = record_one(layer, hidden)
    assert torch.equal(recorded.operator.dense(), without.operator.dense())


def test_the_model_passes_lower_bounds(fla: FLA) -> None:
    first, second = record(fla.model("HGRN", norm_eps=EPS), torch.randint(19, (1, 5)))
    assert first.call.argument("lower_bound").abs().max() == 0
    assert second.call.argument("lower_bound").min() > 0
