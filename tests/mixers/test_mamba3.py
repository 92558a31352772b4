"""Mamba-3 of mamba_ssm: the operator is the module.

Wherever a test takes the ``mamba3`` fixture, a loop over tokens stands in for the module's CUDA
kernel (see :mod:`mamba3_cpu`); ``tests/interpreter`` holds the loop and the operator to the kernel
itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from oracles import COMPONENTS, PRESETS, relative_error
from oracles.mamba3_formula import formula
from torch import Tensor, nn
from zoo.mamba3_cpu import Mamba3

from captum_ssm import ImplicitAttention
from captum_ssm.errors import CachedStateError, InputError, UnsupportedMixerError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.mamba3 import mamba_ssm_mamba3

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


@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
@pytest.mark.parametrize("case", OPTIONS)
def test_reproduces_the_module(mamba3: Mamba3, case: str, tokens: int) -> None:
    mixer = mamba3.make(WIDTH, **OPTIONS[case])
    hidden = torch.randn(2, tokens, WIDTH)
    layer = hybrid.record_one(mixer, hidden)
    wanted = formula(mixer, hidden, COMPONENTS)
    hybrid.check_formula_output(wanted, mixer.out_proj)
    assert relative_error(layer.output, wanted.output) <= FLOAT32
    hybrid.check(layer, FLOAT32)
    hybrid.check_formula(layer, wanted, FLOAT32)
    assert layer.architecture == "Mamba-3"


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 3])
def test_many_tokens(mamba3: Mamba3, batch: int) -> None:
    """Past the operator's chunks, and many turns of the angles."""
    mixer = mamba3.make(WIDTH, is_outproj_norm=batch == 3)
    hidden = torch.randn(batch, 70, WIDTH)
    layer = hybrid.record_one(mixer, hidden)
    hybrid.check(layer, FLOAT32)
    wanted = formula(mixer, hidden[:1], COMPONENTS)
    assert relative_error(layer.linear.output()[:1], wanted.output) <= FLOAT32


@pytest.mark.parametrize("case", OPTIONS)
def test_typical_error(mamba3: Mamba3, case: str) -> None:
    draws = 15
    hybrid.check_typical(
        [
            hybrid.check(
                hybrid.record_one(mamba3.make(WIDTH, **OPTIONS[case]), torch.randn(2, 16, WIDTH)),
                FLOAT32,
            )
            for _ in range(draws)
        ],
        5e-7,
    )


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


@pytest.mark.parametrize(
    "components",
    [
        PRESETS["s6"],
        PRESETS["unified"],
        COMPONENTS,
        *(COMPONENTS - {name} for name in sorted(COMPONENTS)),
    ],
    ids=lambda names: "-".join(sorted(names)),
)
def test_every_ablation(mamba3: Mamba3, components: Collection[str]) -> None:
    mixer = mamba3.make(WIDTH, ngroups=2, is_outproj_norm=True).double()
    hidden = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    operator = hybrid.record_one(mixer, hidden).linear.restrict(components).operator
    wanted = formula(mixer, hidden, components).alpha
    assert operator.dtype == torch.float64
    assert relative_error(operator.dense(None), wanted) <= 1e-12
    assert relative_error(operator.dense(), wanted.mean(1)) <= 1e-12
    assert relative_error(operator.rows([7, 3], None), wanted[:, :, [7, 3]]) <= 1e-12
    by_head = wanted.unflatten(1, (4, 8))
    assert relative_error(operator.dense("heads"), by_head.mean(2)) <= 1e-12
    chosen = by_head[:, [3, 1]].flatten(1, 2)
    assert relative_error(operator.select([3, 1]).dense(None), chosen) <= 1e-12


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


def test_coefficients_are_frozen(mamba3: Mamba3) -> None:
    mixer = mamba3.make(WIDTH, is_outproj_norm=True)
    linear = hybrid.record_one(mixer, torch.randn(2, 6, WIDTH)).linear
    before = {name: t.clone() for name, t in linear.operator.tensors().items()}
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(1)
    for name, tensor in linear.operator.tensors().items():
        assert torch.equal(tensor, before[name]), name


# --- whole models ----------------------------------------------------------------------------


class Uncached(nn.Module):
    """A language model that takes ``use_cache``, as the checks tell every model not to cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        return self.model(ids)


@pytest.fixture(params=[False, True], ids=["plain", "norm"])
def model(request: pytest.FixtureRequest, mamba3: Mamba3) -> Uncached:
    return Uncached(mamba3.make_lm(WIDTH, ngroups=2, is_outproj_norm=request.param))


def test_whole_model(model: Uncached) -> None:
    ids = torch.randint(16, (2, 19))
    layers = hybrid.record(model, ids)
    assert [layer.architecture for layer in layers] == ["Mamba-3"] * 2
    for layer in layers:
        hybrid.check(layer, FLOAT32)
    hybrid.check_same_logits(model, ids)


def test_methods(model: Uncached) -> None:
    ids = torch.randint(16, (2, 11))
    hybrid.check_methods(model, ids)
    for matrices in ImplicitAttention(model).matrices(ids, reduce="heads"):
        assert matrices.shape == (2, 4, 11, 11) and matrices.any()


def test_attribution_by_hand(model: Uncached, mamba3: Mamba3) -> None:
    def unified(mixer: Any, hidden: Tensor, _: dict[str, Any]) -> hybrid.Formula:
        return formula(mixer, hidden, PRESETS["unified"])

    ids = torch.randint(16, (2, 9))
    hybrid.check_attribution_by_hand(model, mamba3.module.Mamba3, unified, ids)


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
