"""Mamba-3 of mamba_ssm: the operator is the module.

Wherever a test takes the ``mamba3`` fixture, a loop over tokens stands in for the module's CUDA
kernel (see :mod:`mamba3_cpu`); ``tests/interpreter`` holds the loop and the operator to the kernel
itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import contract
from helpers import hybrid_checks as hybrid
from oracles import COMPONENTS, PRESETS, relative_error
from oracles.mamba3_formula import formula
from torch import Tensor
from zoo.mamba3_cpu import Mamba3

from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import CachedStateError, InputError, UnsupportedMixerError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.mamba3 import mamba_ssm_mamba3

pytestmark = pytest.mark.slow

WIDTH = 16  # E; D = 32 channels, H = 4 heads
FLOAT32 = 1e-5  # for any draw; typical is 2e-7
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"is_outproj_norm": True},
    "two groups": {"ngroups": 2},
    "a group per head": {"ngroups": 4, "is_outproj_norm": True},
    "all channels turned": {"rope_fraction": 1.0, "d_state": 16},
    "wide": {"expand": 4, "ngroups": 2, "d_state": 16},
    "one head": {"headdim": 32},
    "small heads": {"headdim": 4, "ngroups": 2, "is_outproj_norm": True},
    "odd state": {"d_state": 14, "rope_fraction": 0.5},  # 3 angles
    "floor": {"A_floor": 0.6},
}


@pytest.fixture
def mamba3(mamba_ssm: Any, monkeypatch: pytest.MonkeyPatch) -> Mamba3:
    return Mamba3(mamba_ssm, monkeypatch)


# --- one mixer -------------------------------------------------------------------------------


def test_the_floor_of_the_decay(mamba3: Mamba3) -> None:
    """The case of the formula with a floor is one where it matters."""
    mixer = mamba3.make(WIDTH, **OPTIONS["floor"])
    hidden = torch.randn(2, 13, WIDTH)
    with_floor = hybrid.record_one(mixer, hidden).operator.dense()
    mixer.A_floor = 1e-4
    assert relative_error(hybrid.record_one(mixer, hidden).operator.dense(), with_floor) > 1e-3


def test_a_short_step_before_a_long_one_keeps_its_digits(mamba3: Mamba3) -> None:
    """The diagonal does not count the next step, so it is not a small difference of large terms."""
    mixer = mamba3.make(WIDTH)
    with torch.no_grad():
        mixer.in_proj.weight[-14:-10] *= 6  # dt, before 4 rows of A, 4 of lambda and 2 of angles
        for norm, bias in ((mixer.B_norm, mixer.B_bias), (mixer.C_norm, mixer.C_bias)):
            norm.weight.mul_(0.1)
            bias.abs_().add_(1)  # q . k is far from 0
    hidden = torch.randn(2, 40, WIDTH)
    found = hybrid.record_one(mixer, hidden).linear.restrict(PRESETS["s6"]).operator.dense(None)
    wanted = formula(mixer, hidden, PRESETS["s6"]).alpha
    found, wanted = (x.diagonal(dim1=-2, dim2=-1) for x in (found, wanted))
    assert wanted.min() < 1e-3 * wanted.max()
    assert ((found - wanted).abs() <= 1e-4 * wanted).all()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", ["plain", "a group per head"])
def test_half_precision(mamba3: Mamba3, case: str, whole: bool) -> None:
    """Also as constructed with a half dtype, which leaves D and the biases in float32."""
    mixer = mamba3.make(WIDTH, dtype=torch.bfloat16, **OPTIONS[case])
    mixer = mixer.to(torch.bfloat16) if whole else mixer
    dtypes = {name: p.dtype for name, p in mixer.named_parameters()}
    assert (dtypes["D"] == torch.bfloat16) == whole
    hidden = torch.randn(2, 9, WIDTH).bfloat16()
    layer = hybrid.record_one(mixer, hidden)
    hybrid.check_half(layer, 1e-1)
    assert (
        relative_error(layer.linear.output(), formula(mixer, hidden, COMPONENTS).output) <= FLOAT32
    )
    assert {name: p.dtype for name, p in mixer.named_parameters()} == dtypes


# --- whole models ----------------------------------------------------------------------------


# --- what is refused -------------------------------------------------------------------------


def test_several_inputs_and_outputs_are_refused(
    mamba3: Mamba3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*, V: Tensor, **_: Any) -> Tensor:
        return torch.zeros_like(V)

    monkeypatch.setattr(mamba3.module, "mamba3_mimo_combined", kernel)
    mixer = mamba3.make(WIDTH, is_mimo=True, mimo_rank=2)
    layer = hybrid.record_one(mixer, torch.randn(1, 4, WIDTH))
    with pytest.raises(UnsupportedMixerError, match=r"is_mimo=True \(mimo_rank=2\).*is_mimo=False"):
        _ = layer.operator


@pytest.mark.parametrize(("name", "position"), [("seq_idx", 1), ("cu_seqlens", 2)])
def test_packed_sequences_are_refused(mamba3: Mamba3, name: str, position: int) -> None:
    mixer, x = mamba3.make(WIDTH), torch.randn(1, 4, WIDTH)
    packed = torch.tensor([0, 4], dtype=torch.int32)
    by_position = (x, *[None] * (position - 1), packed)
    for call in (Call((x,), {name: packed}, x), Call(by_position, {}, x)):
        with pytest.raises(InputError, match=name):
            mamba_ssm_mamba3(mixer, call)


def test_caches_are_refused(mamba3: Mamba3) -> None:
    mixer, x, cache = mamba3.make(WIDTH), torch.randn(1, 1, WIDTH), object()
    for call in (Call((x,), {"inference_params": cache}, x), Call((x, None, None, cache), {}, x)):
        with pytest.raises(CachedStateError, match="inference_params"):
            mamba_ssm_mamba3(mixer, call)


ABLATIONS = ("s6", "unified", "exact", *(f"exact-{name}" for name in sorted(COMPONENTS)))


@pytest.mark.parametrize("case", OPTIONS)
def test_contract(mamba3: Mamba3, case: str) -> None:
    def matrices(mixer: Any, hidden: Tensor, _: Any) -> dict[str, Tensor]:
        names = ABLATIONS if case == "a group per head" else ABLATIONS[:3]
        return {name: formula(mixer, hidden, parse_components(name)).alpha for name in names}

    contract.holds(mamba3.make(WIDTH, **OPTIONS[case]), WIDTH, matrices, tokens=13)
