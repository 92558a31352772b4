"""Mamba-1 mixers of transformers and mamba_ssm: the operator is the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.hybrid_checks import check, record, record_one
from helpers.versions import continuing
from oracles import alpha, mamba1_parts, relative_error
from torch import Tensor
from zoo.mamba import padded_batch, randomise, transformers_model

from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import CachedStateError, NonFiniteError, UnsupportedMixerError
from captum_ssm.testing.adapters import check_adapter

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

# float32 against float32 or float64, for any draw of the parameters; typical is 2e-7
FLOAT32 = 1e-5
FAMILIES = ["mamba", "falcon_mamba"]
# the rounding of the formats themselves, for any draw; typical are 5e-3 and 6e-4
HALF = [(torch.bfloat16, 8e-2), (torch.float16, 8e-3)]
KINDS = [*FAMILIES, "mamba_ssm", "mamba_ssm fused"]

ABLATIONS = [
    "s6",
    "unified",
    "exact",
    *(f"unified-{name}" for name in ("conv", "activation", "scan", "gate")),
    *(f"exact-{name}" for name in ("conv", "activation", "scan", "skip", "gate")),
    "exact-scan-skip",
]

#: options of transformers' configuration, and of mamba_ssm's module
MakeMixer = Callable[..., Any]


@pytest.fixture(params=KINDS)
def make_mixer(request: pytest.FixtureRequest) -> MakeMixer:
    """A maker of single mixers, E = 5 and D = 10 unless asked otherwise."""
    if request.param in FAMILIES:

        def make(*, width: int = 5, state: int = 3, kernel: int = 4, bias: bool = False,
                 conv_bias: bool = True) -> Any:  # fmt: skip
            model = transformers_model(
                request.param,
                hidden_size=width,
                state_size=state,
                conv_kernel=kernel,
                use_bias=bias,
                use_conv_bias=conv_bias,
                num_hidden_layers=1,
            )
            return model.backbone.layers[0].mixer

        return make
    fused = request.param.endswith("fused")
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")

    def make(*, width: int = 5, state: int = 3, kernel: int = 4, bias: bool = False,
             conv_bias: bool = True) -> Any:  # fmt: skip
        return randomise(
            package.make_mamba(
                width, d_state=state, d_conv=kernel, bias=bias, conv_bias=conv_bias, fused=fused
            )
        )

    return make


# --- reproduction of the real module --------------------------------------------------------


def test_slow_path_chosen_where_the_fused_one_exists(mamba_ssm_fused: Any) -> None:
    mixer = randomise(mamba_ssm_fused.make_mamba(5, fused=False))
    check(record_one(mixer, torch.randn(2, 6, 5)))


def test_fused_path_chosen_where_it_does_not_exist(mamba_ssm: Any) -> None:
    mixer = randomise(mamba_ssm.make_mamba(5, use_fast_path=True))
    check(record_one(mixer, torch.randn(2, 6, 5)))


# --- padding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", ["right", "middle", "everything"])
def test_padding_anywhere(family: str, where: str) -> None:
    model = transformers_model(family, use_bias=True)
    mask = torch.ones(2, 8, dtype=torch.long)
    hidden_tokens = {"right": slice(5, 8), "middle": slice(2, 5), "everything": slice(0, 8)}
    mask[1, hidden_tokens[where]] = 0
    for layer in record(model, torch.randint(19, (2, 8)), attention_mask=mask):
        check(layer)
        parts = mamba1_parts(layer.mixer.module, layer.call.hidden_states, mask)
        assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= FLOAT32


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    model = transformers_model("mamba")
    ids, mask = padded_batch([6, 3])
    for layer in record(model, ids, attention_mask=mask.to(dtype)):
        check(layer)
        found = layer.linear.mask
        assert found is not None and torch.equal(found, mask.bool())


def test_a_mask_without_padding_is_none() -> None:
    model = transformers_model("mamba")
    for layer in record(model, torch.randint(19, (2, 5)), attention_mask=torch.ones(2, 5)):
        assert layer.linear.mask is None


# --- the matrices ----------------------------------------------------------------------------


def test_row_zero(make_mixer: MakeMixer) -> None:
    """The first token sees itself alone: gate (C . B dt + D) ratio w."""
    mixer = make_mixer()
    hidden = torch.randn(3, 6, 5)
    parts = mamba1_parts(mixer, hidden)
    own = (parts.c[:, 0] * parts.b[:, 0]).sum(-1, keepdim=True) * parts.dt[:, 0] + parts.skip
    own = parts.gate[:, 0] * own * parts.ratio[:, 0] * mixer.conv1d.weight[:, 0, -1].double()
    row = record_one(mixer, hidden).operator.rows([0], None)[:, :, 0]
    assert relative_error(row[..., 0], own) <= FLOAT32
    assert not row[..., 1:].any()


# --- precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "own_error"), HALF)
def test_half_precision_models(family: str, dtype: torch.dtype, own_error: float) -> None:
    model = transformers_model(family).to(dtype)
    ids, mask = padded_batch([8, 5])
    for layer in record(model, ids, attention_mask=mask):
        assert layer.linear.values.dtype == torch.float32
        assert layer.reconstruction_error() <= own_error


def test_autocast(make_mixer: MakeMixer) -> None:
    """Under autocast too the operator is computed in float32."""
    mixer = make_mixer()
    hidden = torch.randn(2, 9, 5)
    with torch.autocast("cpu", torch.bfloat16):
        layer = record_one(mixer, hidden)
        linear = layer.linear
        values = linear.operator.affine(linear.values)
        rebuilt = linear.output()
        matrices, mean = linear.operator.dense(None), linear.operator.dense()
    assert layer.output.dtype in (torch.bfloat16, torch.float32)
    assert relative_error(rebuilt, layer.output) <= 8e-2
    parts = mamba1_parts(mixer, hidden)
    wanted = alpha(parts, "exact")
    assert linear.values.dtype == torch.float32
    assert relative_error(linear.values.flatten(2), parts.values) <= FLOAT32
    assert relative_error(values.flatten(2), parts.before_projection) <= FLOAT32
    assert relative_error(matrices, wanted) <= FLOAT32
    assert relative_error(mean, wanted.mean(1)) <= FLOAT32


# --- other activations -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("act", ["gelu", "relu", "gelu_pytorch_tanh", "swish", "tanh"])
def test_other_activations(family: str, act: str) -> None:
    model = transformers_model(family, hidden_act=act, num_hidden_layers=1).double()
    mixer = model.backbone.layers[0].mixer
    hidden = torch.randn(2, 8, 5, dtype=torch.float64)
    layer = record_one(mixer, hidden)
    check(layer)
    wanted = alpha(mamba1_parts(mixer, hidden), "unified")
    operator = layer.linear.restrict(parse_components("unified")).operator
    assert relative_error(operator.dense(None), wanted) <= 1e-12


@pytest.mark.parametrize("act", ["silu", "gelu", "relu", "tanh"])
def test_an_activation_of_exactly_zero(act: str) -> None:
    """act(u) / u is the derivative there: 1/2, 1/2, 0 (as torch has it) and 1."""
    model = transformers_model("mamba", hidden_act=act, num_hidden_layers=1)
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        mixer.conv1d.bias.zero_()
        mixer.conv1d.weight[3] = 0
    layer = record_one(mixer, torch.randn(2, 5, 5))
    ratio = next(leaf for leaf in layer.operator.leaves() if leaf.component == "activation")
    slope = {"silu": 0.5, "gelu": 0.5, "relu": 0.0, "tanh": 1.0}[act]
    assert torch.allclose(ratio.tensors()["weight"][:, :, 3], torch.tensor(slope))
    check(layer)


def test_an_activation_that_is_not_zero_at_zero_is_refused() -> None:
    model = transformers_model("mamba", hidden_act="sigmoid")
    layer, *_ = record(model, torch.randint(19, (1, 4)))
    with pytest.raises(UnsupportedMixerError, match="sigmoid"):
        _ = layer.linear


# --- what cannot be explained --------------------------------------------------------------------


def test_a_cache_given_to_the_model_is_refused() -> None:
    """Before it runs: in version 4 of transformers it drops the cache if told to use none."""
    model = transformers_model("mamba")
    ids = torch.randint(19, (1, 6))
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache_params
    with pytest.raises(CachedStateError, match=r"^cache_params=.* was passed") as caught:
        record(model, ids[:, :1], cache_params=cache)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_given_to_the_mixer_is_refused(family: str, by_position: bool) -> None:
    model = transformers_model(family)
    ids = torch.randint(19, (1, 6))
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache_params
    mixer = model.backbone.layers[0].mixer
    args, kwargs = ((cache,), {}) if by_position else ((), {"cache_params": cache})
    layer, *_ = record(mixer, torch.randn(1, 1, 5), *args, **kwargs, **continuing(6))
    with pytest.raises(CachedStateError, match="cache"):
        _ = layer.operator


@pytest.mark.parametrize("by_position", [False, True])
def test_a_cache_of_mamba_ssm_is_refused(mamba_ssm: Any, by_position: bool) -> None:
    from mamba_ssm.utils.generation import InferenceParams

    mixer = randomise(mamba_ssm.make_mamba(5, layer_idx=0))
    cache = InferenceParams(max_seqlen=8, max_batch_size=1)
    with torch.no_grad():
        mixer(torch.randn(1, 4, 5), inference_params=cache)
    cache.seqlen_offset = 4
    args, kwargs = ((cache,), {}) if by_position else ((), {"inference_params": cache})
    layer = record(mixer, torch.randn(1, 1, 5), *args, **kwargs)[0]
    with pytest.raises(CachedStateError, match="inference_params"):
        _ = layer.operator


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("parameter", "component"),
    [
        ("D", "skip"),
        ("A_log", "scan"),
        ("x_proj.weight", "scan"),
        ("dt_proj.bias", "scan"),
        ("conv1d.weight", "conv"),
        ("conv1d.bias", "conv"),
        ("in_proj.weight", "values"),
    ],
)
def test_a_bad_weight_is_named(parameter: str, component: str, bad: float) -> None:
    model = transformers_model("mamba")
    name = "backbone.layers.1.mixer"
    with torch.no_grad():
        model.get_parameter(f"{name}.{parameter}").view(-1)[1] = bad
    first, second = record(model, torch.randint(19, (2, 5)))
    check(first)
    with pytest.raises(NonFiniteError, match=component) as caught:
        _ = second.operator
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_bad_input_is_named() -> None:
    mixer = transformers_model("mamba").backbone.layers[0].mixer
    hidden = torch.randn(2, 5, 5)
    hidden[0, 3, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="values"):
        _ = record_one(mixer, hidden).operator


def matrices(mixer: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor]:
    parts = mamba1_parts(mixer, hidden, kwargs.get("attention_mask"))
    return {name: alpha(parts, name) for name in ABLATIONS}


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": 3},
        {"kernel": 1, "bias": True, "state": 1},
        {"kernel": 7, "conv_bias": False, "state": 16},
        {"width": 1, "kernel": 3},
        {"width": 17, "kernel": 2, "bias": True},
    ],
)
def test_contract(make_mixer: MakeMixer, options: dict[str, Any]) -> None:
    leaks = contract.LEAKS if options.get("bias") and options["kernel"] > 1 else {}
    contract.holds(make_mixer(**options), options.get("width", 5), matrices, leaks)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_contract_of_models(family: str, bias: bool) -> None:
    model = transformers_model(family, use_bias=bias, use_conv_bias=not bias)
    ids, leaks = torch.randint(19, (2, 9)), contract.LEAKS if bias else {}
    check_adapter(lambda: model, ids, matrices, leaks, contract.CORE)
