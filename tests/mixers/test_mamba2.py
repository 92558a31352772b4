"""Mamba-2 of transformers, its hybrids and mamba_ssm, and Mamba-3: the operator is the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import CORE, LEAKS, record, record_one
from oracles import COMPONENTS, PRESETS, Parts, alpha, mamba3_formula, relative_error
from oracles.mamba2_formula import Form, form_of
from oracles.mamba2_formula import mamba2_parts as formula
from torch import Tensor
from zoo.mamba import padded_batch, randomise
from zoo.mamba2 import EPS, HYBRIDS, OPTIONS, first_mixer, make_model
from zoo.mamba2_simple_cpu import Simple
from zoo.mamba3_cpu import Mamba3

from captum_ssm import ImplicitAttentionRollout
from captum_ssm.attr.call.checks import parse_components
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.testing.adapters import check_adapter
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow

FLOAT32 = 1e-5  # against float32 or float64, for any draw; typical is 2e-7
KINDS = ["transformers", "mamba_ssm", "mamba_ssm fused", "simple", "simple fused"]
ABLATIONS = (*contract.ABLATIONS, "exact-norm")
Made = tuple[Any, Form]


def made_of_mamba_ssm(mixer: Any) -> Made:
    randomise(mixer)
    if hasattr(mixer, "norm"):
        assert mixer.norm.eps == 1e-5
        mixer.norm.eps = EPS
    norm_groups = mixer.ngroups if getattr(mixer, "rmsnorm", True) else 0
    if type(mixer).__name__ == "Mamba2Simple" and not mixer.use_mem_eff_path:
        norm_groups = 1
    first = getattr(mixer, "norm_before_gate", False)
    return mixer, Form(
        mixer.ngroups, mixer.d_state, mixer.dt_limit, norm_groups, EPS, norm_first=first
    )


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    """A maker of single mixers, E = 12 and D = 24, and of their form; by mamba_ssm's options."""
    if request.param == "transformers":
        names = {"ngroups": "n_groups", "d_conv": "conv_kernel", "bias": "use_bias"}
        names |= {"conv_bias": "use_conv_bias", "dt_limit": "time_step_limit"}

        def make_hf(**options: Any) -> Made:
            own = {names[name]: value for name, value in options.items()}
            model = make_model("mamba2", num_hidden_layers=1, **own)
            return first_mixer(model), form_of(first_mixer(model), model.config)

        return make_hf
    fused = request.param.endswith("fused")
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    is_simple = request.param.startswith("simple")
    build = Simple(package, monkeypatch).make if is_simple else package.make_mamba2

    def make_ssm(**options: Any) -> Made:
        return made_of_mamba_ssm(build(12, d_state=5, fused=fused, **{"ngroups": 2} | options))

    return make_ssm


def check(mixer: Any, form: Form, hidden: Tensor, **options: Any) -> tuple[Layer, Parts]:
    """The operator is the module, and both are the formula."""
    layer, parts = record_one(mixer, hidden), formula(mixer, hidden, form, **options)
    contract.check(layer)
    assert relative_error(layer.output, parts.output) <= FLOAT32
    assert relative_error(layer.values.flatten(2), parts.values) <= FLOAT32
    assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32
    return layer, parts


@pytest.mark.parametrize("options", [
    {"ngroups": 1, "bias": True, "conv_bias": False},
    {"ngroups": 6, "d_conv": 2, "dt_limit": (0.5, 1.0)},
])  # fmt: skip
def test_contract(make: Callable[..., Made], options: dict[str, Any]) -> None:
    mixer, form = make(**options)

    def matrices(mixer: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor]:
        parts = formula(mixer, hidden, form, kwargs.get("attention_mask"))
        return {name: alpha(parts, name) for name in ABLATIONS}

    contract.holds(mixer, 12, matrices, LEAKS if "bias" in options else {}, tokens=13)


# --- what only some of them have -------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [
    {"D_has_hdim": True},
    {"rmsnorm": False},
    {"norm_before_gate": True, "D_has_hdim": True, "ngroups": 1},
])  # fmt: skip
def test_options_of_mamba_ssm(
    request: pytest.FixtureRequest, options: dict[str, Any], fused: bool
) -> None:
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    mixer = package.make_mamba2(12, d_state=5, fused=fused, **{"ngroups": 2} | options)
    check(*made_of_mamba_ssm(mixer), torch.randn(2, 9, 12))


@pytest.mark.parametrize(("d_ssm", "rmsnorm"), [(8, True), (16, False)])
def test_channels_beside_the_scan(mamba_ssm: Any, d_ssm: int, rmsnorm: bool) -> None:
    """They mix no tokens: the operator has the scanned channels only, and is still exact."""
    mixer = mamba_ssm.make_mamba2(12, d_state=5, d_ssm=d_ssm, ngroups=2, rmsnorm=rmsnorm, bias=True)
    layer, _ = check(*made_of_mamba_ssm(mixer), torch.randn(2, 9, 12))
    assert layer.values.shape == (2, 9, d_ssm // 4, 4)


@pytest.mark.parametrize("fused", [False, True])
def test_learnt_states_before_the_first_token(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """They are a constant of the scan."""
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    simple = Simple(package, monkeypatch)
    mixer = simple.make(12, ngroups=2, learnable_init_states=True, conv_bias=False, fused=fused)
    mixer, form = made_of_mamba_ssm(mixer)
    layer, _ = check(mixer, form, torch.randn(2, 9, 12), initial=mixer.init_states)
    assert layer.bias.any()
    assert not layer.linear.restrict(parse_components("exact-scan")).bias.any()


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_other_activations(act: str) -> None:
    model = make_model("mamba2", hidden_act=act, num_hidden_layers=1)
    check(first_mixer(model), form_of(first_mixer(model), model.config), torch.randn(2, 8, 12))


# --- hybrids ---------------------------------------------------------------------------------


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    groups = {"zamba2": "mamba_ngroups", "nemotron_h": "n_groups"}
    for family in HYBRIDS:
        bias, conv_bias, kernel, limit = OPTIONS[family]
        yield family, {bias: True, kernel: 3} | ({conv_bias: False} if conv_bias else {})
        limits = {limit: (0.5, 1.0)} if limit else {"time_step_min": 0.5}
        yield family, {groups.get(family, "mamba_n_groups"): 6, **limits}
    for norm, first, channels in ((True, False, 16), (True, True, 24), (False, True, 32)):
        own = {"mamba_rms_norm": norm, "mamba_norm_before_gate": first}
        yield "falcon_h1", {**own, "mamba_d_ssm": channels, "mamba_n_heads": channels // 4}


@pytest.mark.parametrize(("family", "options"), list(rows()))
def test_contract_of_hybrids(family: str, options: dict[str, Any]) -> None:
    model = make_model(family, **options)

    def matrices(module: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor] | None:
        if not hasattr(module, "A_log"):
            return None
        mask = kwargs.get("attention_mask")
        parts = formula(module, hidden, form_of(module, model.config), mask)
        return {name: alpha(parts, name) for name in ("s6", "exact", "exact-norm", "exact-gate")}

    ids, leaks = torch.randint(19, (2, 9)), LEAKS if OPTIONS[family][0] in options else {}
    check_adapter(lambda: model, ids, matrices, leaks, CORE)


def test_zamba2_of_version_4_is_refused_if_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("zamba2")
    ids, mask = padded_batch([6, 4])
    kind = type(first_mixer(model))
    monkeypatch.setattr(kind, "torch_forward", kind.forward, raising=False)
    layer, *_ = record(model, ids, attention_mask=mask)
    with pytest.raises(UnsupportedMixerError, match="Zamba 2 on a CPU in transformers 4"):
        _ = layer.linear


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid", "zamba2"])
def test_rollouts_of_scaled_parallel_and_feeding_mixers(family: str) -> None:
    model, ids = make_model(family).double(), torch.randint(19, (2, 8))
    eye = torch.eye(8).double()
    product, fed, beside = eye, eye, torch.zeros(1, 8, 8).double()
    for layer in record(model, ids):
        attends = "Attention" in type(layer.mixer.module).__name__
        unified = layer.linear.restrict(parse_components("unified")).operator
        mean = unified.per_channel().dense(None).mean(1)
        if family == "falcon_h1":
            beside = beside + (0.5 if attends else 0.6) * mean
            product = (eye + beside) @ product if attends else product
            beside = 0 * beside if attends else beside
        elif family == "zamba2" and attends:
            fed = eye + mean
        else:
            scale = 0.4 if family == "granitemoehybrid" else 1.0
            product, fed = (eye + scale * mean @ fed) @ product, eye
    found = ImplicitAttentionRollout(model).attribute(ids, query="last")
    assert relative_error(found, product[:, -1]) <= 2e-5


# --- Mamba-3 ---------------------------------------------------------------------------------

WIDTH = 16  # E; D = 32 channels, H = 4 heads
MAMBA3: list[dict[str, Any]] = [
    {"ngroups": 4, "is_outproj_norm": True},
    {"rope_fraction": 1.0, "d_state": 16},
    {"expand": 4, "ngroups": 2, "d_state": 16},
    {"headdim": 32},
    {"headdim": 4, "ngroups": 2, "is_outproj_norm": True},
    {"d_state": 14, "rope_fraction": 0.5},  # 3 angles
    {"A_floor": 0.6},
]


@pytest.fixture
def mamba3(mamba_ssm: Any, monkeypatch: pytest.MonkeyPatch) -> Mamba3:
    """A loop over tokens stands in for the CUDA kernel; tests/interpreter compares the two."""
    return Mamba3(mamba_ssm, monkeypatch)


@pytest.mark.parametrize("options", MAMBA3)
def test_contract_of_mamba3(mamba3: Mamba3, options: dict[str, Any]) -> None:
    ablations = ("s6", "unified", "exact", *(f"exact-{name}" for name in sorted(COMPONENTS)))

    def matrices(mixer: Any, hidden: Tensor, _: Any) -> dict[str, Tensor]:
        names = ablations if options is MAMBA3[0] else ablations[:3]
        find = mamba3_formula.matrices
        return {name: find(mixer, hidden, parse_components(name)) for name in names}

    mixer = mamba3.make(WIDTH, **options)
    contract.holds(mixer, WIDTH, matrices, tokens=13)
    if "A_floor" in options:  # a case where it matters
        hidden = torch.randn(2, 13, WIDTH)
        with_floor = record_one(mixer, hidden).operator.dense()
        mixer.A_floor = 1e-4
        assert relative_error(record_one(mixer, hidden).operator.dense(), with_floor) > 1e-3


def test_a_short_step_before_a_long_one_keeps_its_digits(mamba3: Mamba3) -> None:
    """The diagonal does not count the next step, so it is not a small difference of large terms."""
    mixer = mamba3.make(WIDTH)
    with torch.no_grad():
        mixer.in_proj.weight[-14:-10] *= 6  # dt, before 4 rows of A, 4 of lambda and 2 of angles
        for norm, bias in ((mixer.B_norm, mixer.B_bias), (mixer.C_norm, mixer.C_bias)):
            norm.weight.mul_(0.1)
            bias.abs_().add_(1)  # q . k is far from 0
    hidden, s6 = torch.randn(2, 40, WIDTH), PRESETS["s6"]
    found = record_one(mixer, hidden).linear.restrict(s6).operator.dense(None)
    wanted = mamba3_formula.matrices(mixer, hidden, s6)
    found, wanted = (x.diagonal(dim1=-2, dim2=-1) for x in (found, wanted))
    assert wanted.min() < 1e-3 * wanted.max()
    assert ((found - wanted).abs() <= 1e-4 * wanted).all()


def test_a_half_dtype_of_its_own(mamba3: Mamba3) -> None:
    """As constructed with it, D and the biases stay in float32."""
    mixer = mamba3.make(WIDTH, dtype=torch.bfloat16)
    assert mixer.D.dtype == torch.float32 and mixer.in_proj.weight.dtype == torch.bfloat16
    layer = record_one(mixer, torch.randn(2, 9, WIDTH).bfloat16())
    assert layer.linear.values.dtype == layer.linear.operator.dtype == torch.float32
    assert layer.reconstruction_error() <= 1e-1


def test_several_inputs_and_outputs_are_refused(
    mamba3: Mamba3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mamba3.module, "mamba3_mimo_combined", lambda *, V, **_: torch.zeros_like(V)
    )
    layer = record_one(mamba3.make(WIDTH, is_mimo=True, mimo_rank=2), torch.randn(1, 4, WIDTH))
    with pytest.raises(UnsupportedMixerError, match=r"is_mimo=True \(mimo_rank=2\).*is_mimo=False"):
        _ = layer.operator
