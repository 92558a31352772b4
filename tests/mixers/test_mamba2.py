"""Mamba-2 of transformers and of mamba_ssm: the operator is the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import contract
from oracles import relative_error
from oracles.mamba2_formula import Form, Parts, alpha, form_of
from oracles.mamba2_formula import mamba2_parts as formula
from torch import Tensor
from zoo.mamba import randomise
from zoo.mamba2 import EPS, close_to, first_mixer, make_model
from zoo.mamba2_simple_cpu import Simple

from captum_ssm import trace
from captum_ssm.attr.call.components import parse_components
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

# float32 against float32 or float64, for any draw of the parameters; typical is 2e-7
FLOAT32 = 1e-5
KINDS = ["transformers", "mamba_ssm", "mamba_ssm fused", "simple", "simple fused"]
ABLATIONS = [
    "s6",
    "unified",
    "exact",
    *(f"exact-{name}" for name in ("conv", "activation", "scan", "skip", "gate", "norm")),
    "exact-scan-skip",
]
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
    """A maker of single mixers, E = 12 and D = 24, and of their form."""
    if request.param == "transformers":

        def make_hf(*, groups: int = 2, kernel: int = 4, bias: bool = False,
                    conv_bias: bool = True, limit: Any = (0.0, float("inf"))) -> Made:  # fmt: skip
            model = make_model(
                "mamba2",
                n_groups=groups,
                conv_kernel=kernel,
                use_bias=bias,
                use_conv_bias=conv_bias,
                time_step_limit=limit,
                num_hidden_layers=1,
            )
            mixer = first_mixer(model)
            return mixer, form_of(mixer, model.config)

        return make_hf
    fused = request.param.endswith("fused")
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    if request.param.startswith("simple"):
        build = Simple(package, monkeypatch).make
    else:
        build = package.make_mamba2

    def make_ssm(*, groups: int = 2, kernel: int = 4, bias: bool = False, conv_bias: bool = True,
                 limit: Any = (0.0, float("inf"))) -> Made:  # fmt: skip
        mixer = build(
            12,
            d_state=5,
            ngroups=groups,
            d_conv=kernel,
            bias=bias,
            conv_bias=conv_bias,
            dt_limit=limit,
            fused=fused,
        )
        return made_of_mamba_ssm(mixer)

    return make_ssm


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    """The layers of a run, whose operators are made where a test asks for them."""
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


def check(mixer: Any, form: Form, hidden: Tensor, **options: Any) -> tuple[Layer, Parts]:
    """The operator is the module, and both are the formula."""
    (layer,) = record(mixer, hidden)
    parts = formula(mixer, hidden, form, **options)
    assert layer.reconstruction_error() <= FLOAT32
    assert relative_error(layer.output, parts.output) <= FLOAT32
    assert relative_error(layer.linear.output(), parts.output) <= FLOAT32
    assert relative_error(layer.values.flatten(2), parts.values) <= FLOAT32
    before = layer.operator.affine(layer.values)
    assert relative_error(before.flatten(2), parts.before_projection) <= FLOAT32
    return layer, parts


def test_limits_of_dt(make: Callable[..., Made]) -> None:
    mixer, form = make(limit=(0.5, 1.0))
    with torch.no_grad():
        mixer.dt_bias.fill_(close_to(0.75))
        mixer.in_proj.weight[-6:] *= 3
    hidden = torch.randn(2, 9, 12)
    layer, _ = check(mixer, form, hidden)
    scan = next(leaf for leaf in layer.operator.leaves() if leaf.component == "scan")
    dt = scan.tensors()["scale"]
    assert (dt == 0.5).any() and (dt == 1).any() and ((dt > 0.5) & (dt < 1)).any()


# --- what only some of them have -------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"D_has_hdim": True},
        {"rmsnorm": False},
        {"norm_before_gate": True},
        {"norm_before_gate": True, "D_has_hdim": True, "ngroups": 1},
    ],
)
def test_options_of_mamba_ssm(
    request: pytest.FixtureRequest, options: dict[str, Any], fused: bool
) -> None:
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    mixer = package.make_mamba2(12, d_state=5, fused=fused, **{"ngroups": 2} | options)
    layer, parts = check(*made_of_mamba_ssm(mixer), torch.randn(2, 9, 12))
    assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32


@pytest.mark.parametrize("rmsnorm", [False, True])
@pytest.mark.parametrize("d_ssm", [8, 16])
def test_channels_beside_the_scan(mamba_ssm: Any, d_ssm: int, rmsnorm: bool) -> None:
    """They mix no tokens: the operator has the scanned channels only, and is still exact."""
    mixer = mamba_ssm.make_mamba2(12, d_state=5, d_ssm=d_ssm, ngroups=2, rmsnorm=rmsnorm, bias=True)
    layer, parts = check(*made_of_mamba_ssm(mixer), torch.randn(2, 9, 12))
    assert layer.values.shape == (2, 9, d_ssm // 4, 4)
    assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32


@pytest.mark.parametrize("fused", [False, True])
def test_learnt_states_before_the_first_token(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """They are a constant of the scan."""
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    simple = Simple(package, monkeypatch)
    mixer = simple.make(12, ngroups=2, learnable_init_states=True, conv_bias=False, fused=fused)
    mixer, form = made_of_mamba_ssm(mixer)
    hidden = torch.randn(2, 9, 12)
    layer, parts = check(mixer, form, hidden, initial=mixer.init_states)
    assert layer.bias.any()
    assert not layer.linear.restrict(parse_components("exact-scan")).bias.any()
    assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_other_activations(act: str) -> None:
    model = make_model("mamba2", hidden_act=act, num_hidden_layers=1)
    mixer = first_mixer(model)
    hidden = torch.randn(2, 8, 12)
    (layer,) = record(mixer, hidden)
    assert layer.reconstruction_error() <= FLOAT32
    assert (
        relative_error(
            layer.linear.output(), formula(mixer, hidden, form_of(mixer, model.config)).output
        )
        <= FLOAT32
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 1, "bias": True, "conv_bias": False},
        {"groups": 3, "kernel": 2},
        {"groups": 6, "kernel": 6},
    ],
)
def test_contract(make: Callable[..., Made], options: dict[str, Any]) -> None:
    mixer, form = make(**options)
    names = ABLATIONS if options else ABLATIONS[:3]

    def matrices(mixer: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor]:
        parts = formula(mixer, hidden, form, kwargs.get("attention_mask"))
        return {name: alpha(parts, name) for name in names}

    leaks = contract.LEAKS if "bias" in options else {}
    contract.holds(mixer, 12, matrices, leaks, tokens=13)
