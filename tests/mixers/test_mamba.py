"""Mamba-1 mixers of transformers and mamba_ssm: the operator is the module."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.hybrid_checks import check, record, record_one
from helpers.versions import continuing
from oracles import alpha, mamba1_parts, relative_error, times
from torch import Tensor
from zoo.mamba import padded_batch, randomise, transformers_model

from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import CachedStateError, NonFiniteError, UnsupportedMixerError

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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_reproduces_the_module(make_mixer: MakeMixer, batch: int, tokens: int) -> None:
    mixer = make_mixer()
    hidden = torch.randn(batch, tokens, 5)
    layer = record_one(mixer, hidden)
    assert layer.output.shape == hidden.shape
    assert relative_error(layer.output, mamba1_parts(mixer, hidden).output) <= FLOAT32
    check(layer)


def test_typical_error(make_mixer: MakeMixer) -> None:
    """Half of all draws agree with the module, and with the float64 formula, to 5e-7."""
    against_module, against_formula = [], []
    for _ in range(15):
        mixer, hidden = make_mixer(), torch.randn(2, 16, 5)
        layer = record_one(mixer, hidden)
        against_module.append(layer.reconstruction_error())
        wanted = mamba1_parts(mixer, hidden).output
        against_formula.append(relative_error(layer.linear.output(), wanted))
    assert statistics.median(against_module) <= 5e-7
    assert statistics.median(against_formula) <= 5e-7


def test_coefficients_are_frozen(make_mixer: MakeMixer) -> None:
    """No coefficient belongs to an autograd graph or changes with the module's weights."""
    mixer = make_mixer()
    linear = record_one(mixer, torch.randn(2, 6, 5)).linear
    before = {name: t.clone() for name, t in linear.operator.tensors().items()}
    assert not linear.values.requires_grad
    assert not linear.operator.dense().requires_grad
    assert not any(t.requires_grad for t in before.values())
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(1)
    for name, tensor in linear.operator.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("conv_bias", [False, True])
@pytest.mark.parametrize("kernel", range(1, 8))
def test_kernels_and_biases(
    make_mixer: MakeMixer, kernel: int, conv_bias: bool, bias: bool
) -> None:
    mixer = make_mixer(kernel=kernel, conv_bias=conv_bias, bias=bias)
    assert (mixer.conv1d.bias is not None) == conv_bias
    assert (mixer.in_proj.bias is not None) == (mixer.out_proj.bias is not None) == bias
    for tokens in {1, 2, max(1, kernel - 1), kernel, 9}:
        check(record_one(mixer, torch.randn(2, tokens, 5)))


@pytest.mark.parametrize("state", [1, 2, 5, 16, 64])
def test_state_sizes(make_mixer: MakeMixer, state: int) -> None:
    check(record_one(make_mixer(state=state), torch.randn(2, 11, 5)))


@pytest.mark.parametrize("width", [1, 2, 17, 33])
def test_widths(make_mixer: MakeMixer, width: int) -> None:
    check(record_one(make_mixer(width=width), torch.randn(2, 7, width)))


def test_long_sequence(make_mixer: MakeMixer) -> None:
    mixer = make_mixer(width=3, state=2)
    check(record_one(mixer, torch.randn(2, 257, 3)))


def test_training_mode(make_mixer: MakeMixer) -> None:
    check(record_one(make_mixer().train(), torch.randn(2, 7, 5)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models(family: str, bias: bool) -> None:
    model = transformers_model(family, use_bias=bias, num_hidden_layers=3)
    layers = record(model, torch.randint(19, (3, 12)))
    assert len(layers) == 3
    for layer in layers:
        check(layer)


@pytest.mark.parametrize("fused", [False, True])
def test_whole_models_of_mamba_ssm(request: pytest.FixtureRequest, fused: bool) -> None:
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    model = randomise(package.make_lm(9, n_layer=3))
    layers = record(model, torch.randint(16, (2, 11)))
    assert [layer.name for layer in layers] == [f"backbone.layers.{i}.mixer" for i in range(3)]
    for layer in layers:
        check(layer)


def test_slow_path_chosen_where_the_fused_one_exists(mamba_ssm_fused: Any) -> None:
    mixer = randomise(mamba_ssm_fused.make_mamba(5, fused=False))
    check(record_one(mixer, torch.randn(2, 6, 5)))


def test_fused_path_chosen_where_it_does_not_exist(mamba_ssm: Any) -> None:
    mixer = randomise(mamba_ssm.make_mamba(5, use_fast_path=True))
    check(record_one(mixer, torch.randn(2, 6, 5)))


# --- padding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("conv_bias", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding(family: str, conv_bias: bool, bias: bool) -> None:
    model = transformers_model(family, use_bias=bias, use_conv_bias=conv_bias)
    ids, mask = padded_batch([9, 4, 1])
    for layer in record(model, ids, attention_mask=mask):
        check(layer)
        linear = layer.linear
        assert linear.mask is not None
        assert torch.equal(linear.mask, mask.bool())
        hidden = layer.call.hidden_states
        parts = mamba1_parts(layer.mixer.module, hidden, mask)
        assert relative_error(
            linear.project(linear.operator.affine(linear.values)), parts.output
        ) <= (3e-6)
        matrices = linear.operator.dense(None)
        assert relative_error(matrices, alpha(parts, "exact")) <= FLOAT32
        padded_columns = (mask == 0)[:, None, None, :].expand_as(matrices)
        assert not matrices[padded_columns].any()


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


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_matrix(family: str) -> None:
    """An example alone, and the same one padded: the matrices of its tokens agree."""
    model = transformers_model(family)
    ids, mask = padded_batch([9, 5])
    together = record(model, ids, attention_mask=mask)
    alone = record(model, ids[1:, 4:])
    for padded, single in zip(together, alone, strict=True):
        found = padded.operator.dense(None)[1:, :, 4:, 4:]
        assert relative_error(found, single.operator.dense(None)) <= FLOAT32


def test_a_mask_without_padding_is_none() -> None:
    model = transformers_model("mamba")
    for layer in record(model, torch.randint(19, (2, 5)), attention_mask=torch.ones(2, 5)):
        assert layer.linear.mask is None


# --- the matrices ----------------------------------------------------------------------------


@pytest.mark.parametrize("conv_bias", [False, True])
def test_exact_matrices_give_what_enters_the_projection(
    make_mixer: MakeMixer, request: pytest.FixtureRequest, conv_bias: bool
) -> None:
    mixer = make_mixer(conv_bias=conv_bias)
    hidden = torch.randn(2, 9, 5)
    seen: list[Tensor] = []
    handle = mixer.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer = record_one(mixer, hidden)
    handle.remove()
    if "fused" in request.node.name:  # no submodule is called there
        assert not seen
        seen.append(mamba1_parts(mixer, hidden).before_projection)
    exact = layer.linear.restrict(parse_components("exact"))
    matrices = exact.operator.dense(None)
    rebuilt = times(matrices.double(), exact.values) + exact.bias
    assert relative_error(rebuilt.flatten(2), seen[0]) <= FLOAT32
    assert bool(exact.bias.any()) == conv_bias


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


@pytest.mark.parametrize("components", ABLATIONS)
def test_strictly_causal(make_mixer: MakeMixer, components: str) -> None:
    layer = record_one(make_mixer(kernel=3), torch.randn(2, 11, 5))
    operator = layer.linear.restrict(parse_components(components)).operator
    assert not operator.dense(None).triu(1).any()
    assert not operator.dense("mean").triu(1).any()


@pytest.mark.parametrize("components", ABLATIONS)
def test_every_ablation(make_mixer: MakeMixer, components: str) -> None:
    mixer = make_mixer(kernel=3)
    hidden = torch.randn(2, 10, 5)
    wanted = alpha(mamba1_parts(mixer, hidden), components)
    layer = record_one(mixer, hidden)
    operator = layer.linear.restrict(parse_components(components)).operator
    assert relative_error(operator.dense(None), wanted) <= FLOAT32
    assert relative_error(operator.dense("mean"), wanted.mean(1)) <= FLOAT32
    assert relative_error(operator.dense("max"), wanted.amax(1)) <= FLOAT32
    assert relative_error(operator.rows([9, 4], None), wanted[:, :, [9, 4]]) <= FLOAT32


@pytest.mark.parametrize("components", [*ABLATIONS, {"gate"}, {"conv", "skip"}, {"norm"}])
def test_every_ablation_in_float64(make_mixer: MakeMixer, components: Any) -> None:
    mixer = make_mixer(kernel=5, bias=True).double()
    hidden = torch.randn(2, 8, 5, dtype=torch.float64)
    wanted = alpha(mamba1_parts(mixer, hidden), components)
    layer = record_one(mixer, hidden)
    operator = layer.linear.restrict(parse_components(components)).operator
    assert operator.dense(None).dtype == torch.float64
    assert relative_error(operator.dense(None), wanted) <= 1e-12
    assert relative_error(operator.dense("mean"), wanted.mean(1)) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("components", ABLATIONS)
def test_every_ablation_with_padding(family: str, components: str) -> None:
    model = transformers_model(family, use_bias=True).double()
    ids, mask = padded_batch([7, 3])
    for layer in record(model, ids, attention_mask=mask):
        parts = mamba1_parts(layer.mixer.module, layer.call.hidden_states, mask)
        operator = layer.linear.restrict(parse_components(components)).operator
        assert relative_error(operator.dense(None), alpha(parts, components)) <= 1e-12


# --- precision -------------------------------------------------------------------------------


def test_float64_module_is_linearised_in_float64(make_mixer: MakeMixer) -> None:
    """Against the float64 formula; the modules themselves round inside to float32."""
    mixer = make_mixer(bias=True).double()
    hidden = torch.randn(2, 12, 5, dtype=torch.float64)
    parts = mamba1_parts(mixer, hidden)
    layer = record_one(mixer, hidden)
    linear = layer.linear
    assert linear.values.dtype == linear.operator.dtype == torch.float64
    before = linear.operator.affine(linear.values)
    assert relative_error(before.flatten(2), parts.before_projection) <= 1e-12
    assert relative_error(linear.output(), parts.output) <= 1e-12
    check(layer)


def test_float64_module_verifies(make_mixer: MakeMixer) -> None:
    layer = record_one(make_mixer().double(), torch.randn(2, 9, 5, dtype=torch.float64))
    layer.verify()


@pytest.mark.parametrize(("dtype", "own_error"), HALF)
def test_half_precision_is_linearised_in_float32(
    make_mixer: MakeMixer, dtype: torch.dtype, own_error: float
) -> None:
    mixer = make_mixer(bias=True).to(dtype)
    hidden = torch.randn(2, 9, 5).to(dtype)
    layer = record_one(mixer, hidden)
    linear = layer.linear
    assert layer.output.dtype == dtype
    assert linear.values.dtype == linear.operator.dtype == linear.output().dtype == torch.float32
    assert layer.reconstruction_error() <= own_error
    parts = mamba1_parts(mixer, hidden)
    assert relative_error(linear.operator.dense(None), alpha(parts, "exact")) <= FLOAT32
    before = linear.operator.affine(linear.values)
    assert relative_error(before.flatten(2), parts.before_projection) <= FLOAT32
    assert relative_error(linear.output(), parts.output) <= FLOAT32
    assert {p.dtype for p in mixer.parameters()} == {dtype}, "the model was converted"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "own_error"), HALF)
def test_half_precision_models(family: str, dtype: torch.dtype, own_error: float) -> None:
    model = transformers_model(family).to(dtype)
    ids, mask = padded_batch([8, 5])
    for layer in record(model, ids, attention_mask=mask):
        assert layer.linear.values.dtype == torch.float32
        assert layer.reconstruction_error() <= own_error


@pytest.mark.parametrize(("dtype", "typical"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_typical_error_in_half_precision(
    make_mixer: MakeMixer, dtype: torch.dtype, typical: float
) -> None:
    errors = []
    for _ in range(15):
        layer = record_one(make_mixer().to(dtype), torch.randn(2, 9, 5).to(dtype))
        errors.append(layer.reconstruction_error())
    assert statistics.median(errors) <= typical


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
