"""Mamba-2 of transformers and of mamba_ssm: the operator is the module."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles.mamba2_formula import Form, Parts, alpha, form_of
from oracles.mamba2_formula import mamba2_parts as formula
from torch import Tensor
from zoo.mamba import padded_batch, randomise
from zoo.mamba2 import EPS, close_to, first_mixer, make_model
from zoo.mamba2_simple_cpu import Simple

from captum_ssm import trace
from captum_ssm.attr.call.components import parse_components
from captum_ssm.tracing import Layer

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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_reproduces_the_module(make: Callable[..., Made], batch: int, tokens: int) -> None:
    layer, parts = check(*make(), torch.randn(batch, tokens, 12))
    assert layer.values.shape == (batch, tokens, 6, 4)
    wanted = alpha(parts, "exact")
    assert relative_error(layer.operator.dense(None), wanted) <= FLOAT32
    error = (layer.operator.dense() - wanted.mean(1)).abs().max()
    assert error <= FLOAT32 * wanted.abs().mean(1).max()  # channels may cancel in their mean


def test_long_sequence(make: Callable[..., Made]) -> None:
    """Past the chunks of the modules and of the operator."""
    mixer, _ = make()
    (layer,) = record(mixer, torch.randn(2, 71, 12))
    assert layer.reconstruction_error() <= FLOAT32


def test_typical_error(make: Callable[..., Made]) -> None:
    errors = []
    for _ in range(15):
        mixer, _ = make()
        errors.append(record(mixer, torch.randn(2, 16, 12))[0].reconstruction_error())
    assert statistics.median(errors) <= 5e-7


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_groups_and_biases(make: Callable[..., Made], groups: int, bias: bool) -> None:
    mixer, form = make(groups=groups, bias=bias, conv_bias=not bias)
    layer, parts = check(mixer, form, torch.randn(2, 7, 12))
    assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32
    assert bool(layer.bias.any()) == (not bias)


@pytest.mark.parametrize("kernel", [2, 3, 6])
def test_kernels(make: Callable[..., Made], kernel: int) -> None:
    for tokens in (kernel - 1, kernel + 3):
        check(*make(kernel=kernel), torch.randn(2, tokens, 12))


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


@pytest.mark.parametrize("components", ABLATIONS)
def test_every_ablation(make: Callable[..., Made], components: str) -> None:
    mixer, form = make(bias=True)
    mixer.double()
    hidden = torch.randn(2, 8, 12, dtype=torch.float64)
    wanted = alpha(formula(mixer, hidden, form), components)
    (layer,) = record(mixer, hidden)
    operator = layer.linear.restrict(parse_components(components)).operator
    assert operator.dtype == torch.float64
    assert relative_error(operator.dense(None), wanted) <= 1e-12
    assert relative_error(operator.dense("mean"), wanted.mean(1)) <= 1e-12
    assert relative_error(operator.rows([7, 3], None), wanted[:, :, [7, 3]]) <= 1e-12
    by_head = wanted.unflatten(1, (6, 4)).mean(2)
    assert relative_error(operator.dense("heads"), by_head) <= 1e-12
    chosen = wanted.unflatten(1, (6, 4))[:, [4, 1]].flatten(1, 2)
    assert relative_error(operator.select([4, 1]).dense(None), chosen) <= 1e-12


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 5e-2), (torch.float16, 8e-3)])
def test_half_precision(make: Callable[..., Made], dtype: torch.dtype, limit: float) -> None:
    mixer, form = make(bias=True)
    mixer.to(dtype)
    hidden = torch.randn(2, 9, 12).to(dtype)
    (layer,) = record(mixer, hidden)
    linear = layer.linear
    assert layer.output.dtype == dtype
    assert linear.values.dtype == linear.operator.dtype == linear.output().dtype == torch.float32
    assert layer.reconstruction_error() <= limit
    assert relative_error(linear.output(), formula(mixer, hidden, form).output) <= FLOAT32
    assert {p.dtype for p in mixer.parameters()} == {dtype}, "the model was converted"


def test_coefficients_are_frozen(make: Callable[..., Made]) -> None:
    mixer, _ = make(bias=True)
    (layer,) = record(mixer, torch.randn(2, 6, 12))
    linear = layer.linear
    before = {name: t.clone() for name, t in linear.operator.tensors().items()}
    assert not linear.values.requires_grad and not linear.operator.dense().requires_grad
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(1)
    for name, tensor in linear.operator.tensors().items():
        assert torch.equal(tensor, before[name]), name


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


def test_padded_batch_in_the_formula() -> None:
    for bias in (False, True):
        model = make_model("mamba2", use_bias=bias)
        ids, mask = padded_batch([9, 4, 6])
        for layer in record(model, ids, attention_mask=mask):
            mixer = layer.mixer.module
            parts = formula(mixer, layer.call.hidden_states, form_of(mixer, model.config), mask)
            assert layer.reconstruction_error() <= FLOAT32
            assert relative_error(layer.linear.output(), parts.output) <= FLOAT32
            assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32
            assert not layer.operator.dense()[1, :, :5].any()
