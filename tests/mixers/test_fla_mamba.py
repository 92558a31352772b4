"""Mamba, Mamba-2 and Mamba-3 of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

import copy
from typing import Any

import oracles
import pytest
import torch
from helpers import fla_checks
from helpers.fla_checks import EPS, record_one, side_mask
from oracles import COMPONENTS, mamba2_formula, mamba3_formula, relative_error
from torch import Tensor
from zoo import mamba3_cpu
from zoo.fla_cpu import FLA
from zoo.mamba import randomise

from captum_ssm import LatimALTI, LatimLogit
from captum_ssm.errors import InputError, UnsupportedMixerError

pytestmark = pytest.mark.slow

WIDTH = 16
EXACT = 1e-11
SMALL: dict[str, dict[str, Any]] = {
    "Mamba": {"intermediate_size": 24, "state_size": 4},
    "Mamba2": {"head_dim": 8, "state_size": 4, "chunk_size": 4},
    "Mamba3": {"head_dim": 8, "state_size": 8},
}
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("Mamba", "plain"): {},
    ("Mamba", "bias"): {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    ("Mamba2", "plain"): {},
    ("Mamba2", "bias"): {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    ("Mamba2", "a group per head"): {"n_groups": 4, "D_has_hdim": True, "norm_before_gate": True},
    ("Mamba2", "no norm"): {"rmsnorm": False, "dt_limit": (0.1, 0.5)},
    ("Mamba3", "plain"): {},
    ("Mamba3", "norm"): {"is_outproj_norm": True, "use_bias": True},
    ("Mamba3", "two groups"): {"n_groups": 2, "rope_fraction": 1.0, "A_floor": 0.6},
}


def make(fla: FLA, kind: str, case: str) -> Any:
    layer = fla.layer(kind, hidden_size=WIDTH, **SMALL[kind] | CASES[kind, case])
    if kind == "Mamba3":
        return mamba3_cpu.randomised(layer)
    randomise(layer)
    if getattr(layer, "norm", None) is not None:
        layer.norm.eps = EPS
    return layer


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The matrices (B, C, L, L) and the output of a layer in float64, entry by entry."""
    kind = type(layer).__name__
    if kind == "Mamba":
        parts = oracles.mamba1_parts(layer, hidden, mask)
        return oracles.alpha(parts, COMPONENTS), parts.output
    if kind == "Mamba2":
        norms = layer.n_groups if layer.rmsnorm else 0
        form = mamba2_formula.Form(
            layer.n_groups, 4, layer.dt_limit, norms, norm_first=layer.norm_before_gate
        )
        form.norm_eps = EPS
        of_mamba2 = mamba2_formula.mamba2_parts(layer, hidden, form, mask)
        return mamba2_formula.alpha(of_mamba2, COMPONENTS), of_mamba2.output
    # the names of mamba_ssm
    layer.d_state, layer.d_inner = layer.ssm_state_size, layer.intermediate_size
    layer.num_bc_heads = layer.n_groups
    found = mamba3_formula.formula(layer, hidden, COMPONENTS)
    return found.alpha, found.output


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_contract(fla: FLA, kind: str, case: str) -> None:
    layer = copy.deepcopy(make(fla, kind, case)).double()
    hidden = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    linear = record_one(layer, hidden).linear
    matrices, output = formula(layer, hidden, None)
    assert relative_error(linear.operator.per_channel().dense(None), matrices) <= EXACT
    assert relative_error(linear.output(), output) <= EXACT


def test_padding_between_tokens(fla: FLA) -> None:
    mask, hidden = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]]), torch.randn(1, 8, WIDTH)
    for kind in ("Mamba", "Mamba2"):
        recorded = record_one(make(fla, kind, "bias"), hidden, attention_mask=mask)
        assert recorded.reconstruction_error() <= fla_checks.FLOAT32
    with pytest.raises(InputError, match="trapezoidal rule would skip"):
        record_one(make(fla, "Mamba3", "plain"), hidden, attention_mask=mask).verify()


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [("Mamba2", {"n_groups": 2}, "n_groups=2"), ("Mamba3", {"is_mimo": True}, "is_mimo=True")],
)
def test_what_has_no_adapter_is_refused(
    fla: FLA, kind: str, options: dict[str, Any], named: str
) -> None:
    layer = fla.layer(kind, hidden_size=WIDTH, **SMALL[kind] | options)
    layer.forward = lambda hidden_states, **_: (hidden_states, None, None)
    with pytest.raises(UnsupportedMixerError, match=named):
        record_one(layer, torch.randn(1, 4, WIDTH)).verify()


@pytest.mark.parametrize("method", [LatimALTI, LatimLogit])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("lengths", [[11, 6], [6, 11]])
def test_padded_projections(fla: FLA, method: Any, use_bias: bool, lengths: list[int]) -> None:
    """What reads their weight off finds the same, whichever example is padded."""
    model = fla.model("Mamba3", norm_eps=EPS, use_bias=use_bias)
    ids = torch.randint(19, (2, 11))
    for layer in model.backbone.layers if use_bias else ():
        torch.nn.init.normal_(layer.mixer.out_proj.bias)
    together = method(model).attribute(ids, (-1, 3), side_mask(lengths, 11))
    for row, length in enumerate(lengths):
        alone = method(model).attribute(ids[row : row + 1, 11 - length :], (-1, 3))
        assert relative_error(together[row : row + 1, 11 - length :], alone) <= 1e-5
