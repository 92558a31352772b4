"""Mamba-1 mixers of transformers, its hybrids and mamba_ssm: the operator is the module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import ABLATIONS, CORE, LEAKS, check, record, record_one
from oracles import alpha, mamba1_parts, relative_error
from oracles.selection import zamba_heads
from torch import Tensor
from zoo.attention import attention_model
from zoo.mamba import randomise, transformers_model

from captum_ssm.errors import NonFiniteError, UnsupportedMixerError
from captum_ssm.mixers.mamba import calls_dt_proj
from captum_ssm.testing.adapters import check_adapter

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

FLOAT32 = 1e-5  # against float32 or float64, for any draw; typical is 2e-7
FAMILIES = ["mamba", "falcon_mamba"]
KINDS = [*FAMILIES, "mamba_ssm", "mamba_ssm fused"]

#: mamba_ssm's options to a mixer.
MakeMixer = Callable[..., Any]


@pytest.fixture(params=KINDS)
def make_mixer(request: pytest.FixtureRequest) -> MakeMixer:
    """A maker of single mixers, E = 5 and D = 10 unless asked otherwise; by mamba_ssm's options."""
    if request.param in FAMILIES:
        names = {"d_model": "hidden_size", "d_state": "state_size", "d_conv": "conv_kernel"}
        names |= {"bias": "use_bias", "conv_bias": "use_conv_bias"}

        def make_hf(**options: Any) -> Any:
            own = {names[name]: value for name, value in options.items()}
            model = transformers_model(request.param, num_hidden_layers=1, **own)
            return model.backbone.layers[0].mixer

        return make_hf
    fused = request.param.endswith("fused")
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    small = {"d_model": 5, "d_state": 3}
    return lambda **options: randomise(package.make_mamba(fused=fused, **small | options))


def matrices(mixer: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor]:
    parts = mamba1_parts(mixer, hidden, kwargs.get("attention_mask"))
    return {name: alpha(parts, name) for name in ABLATIONS}


@pytest.mark.parametrize("options", [
    {"d_conv": 1, "bias": True, "d_state": 1},
    {"d_model": 17, "d_conv": 2, "bias": True, "conv_bias": False},
    {"d_model": 1, "d_conv": 7, "d_state": 16},
])  # fmt: skip
def test_contract(make_mixer: MakeMixer, options: dict[str, Any]) -> None:
    leaks = LEAKS if options.get("bias") and options["d_conv"] > 1 else {}
    contract.holds(make_mixer(**options), options.get("d_model", 5), matrices, leaks)


@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"hidden_act": "tanh"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_contract_of_models(family: str, options: dict[str, Any]) -> None:
    model, ids = transformers_model(family, **options), torch.randint(19, (2, 9))
    check_adapter(lambda: model, ids, matrices, LEAKS if "use_bias" in options else {}, CORE)


def test_paths_of_mamba_ssm(request: pytest.FixtureRequest) -> None:
    """The slow one where the fused one exists, and the fused one where it does not."""
    mixer = request.getfixturevalue("mamba_ssm_fused").make_mamba(5, fused=False)
    check(record_one(randomise(mixer), torch.randn(2, 6, 5)))
    mixer = request.getfixturevalue("mamba_ssm").make_mamba(5, use_fast_path=True)
    check(record_one(randomise(mixer), torch.randn(2, 6, 5)))


# --- padding and precision -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_anywhere(family: str, dtype: torch.dtype) -> None:
    model = transformers_model(family, use_bias=True)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, 2:5], mask[2] = 0, 0
    for layer in record(model, torch.randint(19, (3, 8)), attention_mask=mask.to(dtype)):
        check(layer)
        parts = mamba1_parts(layer.mixer.module, layer.call.hidden_states, mask)
        assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32
        assert layer.linear.mask is not None and torch.equal(layer.linear.mask, mask.bool())
    for layer in record(model, torch.randint(19, (2, 5)), attention_mask=torch.ones(2, 5)):
        assert layer.linear.mask is None


def test_autocast(make_mixer: MakeMixer) -> None:
    """Under autocast too the operator is computed in float32."""
    mixer, hidden = make_mixer(), torch.randn(2, 9, 5)
    with torch.autocast("cpu", torch.bfloat16):
        linear = record_one(mixer, hidden).linear
        values = linear.operator.affine(linear.values)
        dense, mean = linear.operator.dense(None), linear.operator.dense()
    parts = mamba1_parts(mixer, hidden)
    wanted = alpha(parts, "exact")
    assert linear.values.dtype == torch.float32
    assert relative_error(linear.values.flatten(2), parts.values) <= FLOAT32
    assert relative_error(values.flatten(2), parts.before_projection) <= FLOAT32
    assert relative_error(dense, wanted) <= FLOAT32
    assert relative_error(mean, wanted.mean(1)) <= FLOAT32


# --- other activations -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "slope"), [("silu", 0.5), ("swish", 0.5), ("gelu", 0.5), ("relu", 0.0), ("tanh", 1.0)]
)
def test_activations_at_exactly_zero(act: str, slope: float) -> None:
    """act(u) / u is the derivative there: 1/2, 1/2, 0 (as torch has it) and 1."""
    model = transformers_model("mamba", hidden_act=act, num_hidden_layers=1)
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        mixer.conv1d.bias.zero_()
        mixer.conv1d.weight[3] = 0
    layer = record_one(mixer, torch.randn(2, 5, 5))
    (ratio,) = (x for x in layer.operator.leaves() if x.component == "activation")
    assert torch.allclose(ratio.tensors()["weight"][:, :, 3], torch.tensor(slope))
    check(layer)


def test_an_activation_that_is_not_zero_at_zero_is_refused() -> None:
    model = transformers_model("mamba", hidden_act="sigmoid")
    layer, *_ = record(model, torch.randint(19, (1, 4)))
    with pytest.raises(UnsupportedMixerError, match="sigmoid"):
        _ = layer.linear


# --- what cannot be explained --------------------------------------------------------------------


@pytest.mark.parametrize(("parameter", "component"), [
    ("D", "skip"),
    ("A_log", "scan"),
    ("x_proj.weight", "scan"),
    ("dt_proj.bias", "scan"),
    ("conv1d.weight", "conv"),
    ("conv1d.bias", "conv"),
    ("in_proj.weight", "values"),
])  # fmt: skip
def test_a_bad_weight_is_named(parameter: str, component: str) -> None:
    for bad in (float("nan"), float("inf")):
        model, name = transformers_model("mamba"), "backbone.layers.1.mixer"
        with torch.no_grad():
            model.get_parameter(f"{name}.{parameter}").view(-1)[1] = bad
        first, second = record(model, torch.randint(19, (2, 5)))
        check(first)
        with pytest.raises(NonFiniteError, match=component) as caught:
            _ = second.operator
        assert repr(name) in str(caught.value)
        assert isinstance(caught.value, ValueError)


def test_a_bad_input_is_named() -> None:
    mixer, hidden = transformers_model("mamba").backbone.layers[0].mixer, torch.randn(2, 5, 5)
    hidden[0, 3, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="values"):
        _ = record_one(mixer, hidden).operator


@pytest.mark.parametrize("found", [False, True])
def test_kernels_of_version_4_read_dt_proj_by_its_weight(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    code: Any = ModuleType("code_of_version_4")
    code.mamba_inner_fn = print
    code._lazy_load_causal_conv1d = lambda: (print, print if found else None)
    monkeypatch.setitem(sys.modules, code.__name__, code)
    mixer = type("MambaMixer", (), {"slow_forward": None, "__module__": code.__name__})()
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert calls_dt_proj(mixer, on_gpu) != found


# --- Jamba and Zamba -----------------------------------------------------------------------------


def hybrid(family: str, **options: Any) -> Any:
    # an epsilon that keeps the norms of two features well conditioned
    return attention_model(family, **{"rms_norm_eps": 0.05} | options)


@torch.no_grad()
def hybrid_matrices(mixer: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor] | None:
    if "Mamba" not in type(mixer).__name__:
        return None
    heads = zamba_heads(mixer) if type(mixer).__name__ == "ZambaMambaMixer" else [mixer]
    found = [matrices(head, hidden, kwargs) for head in heads]
    return {name: torch.cat([each[name] for each in found], 1) for name in ABLATIONS}


@pytest.mark.parametrize(("family", "options"), [
    ("jamba", {"mamba_proj_bias": True}),
    ("jamba", {"mamba_conv_bias": False, "mamba_d_conv": 2, "mamba_d_state": 1}),
    ("jamba", {"mamba_d_state": 16, "mamba_expand": 3, "mamba_dt_rank": 5}),
    ("zamba", {"n_mamba_heads": 1, "mamba_d_conv": 2, "mamba_conv_bias": False}),
    ("zamba", {"n_mamba_heads": 4, "mamba_proj_bias": True}),
    ("zamba", {"mamba_d_state": 16, "mamba_expand": 3, "mamba_dt_rank": 5}),
])  # fmt: skip
def test_contract_of_hybrids(family: str, options: dict[str, Any]) -> None:
    model, ids = hybrid(family, **options), torch.randint(1, 23, (2, 9))
    leaks = LEAKS if "mamba_proj_bias" in options else {}
    check_adapter(lambda: model, ids, hybrid_matrices, leaks, CORE)
