"""MambaVision: mixer, attention, windows, and methods across its stages."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.pages import read_page
from helpers.sessions import full
from oracles import PRESETS, relative_error
from oracles import mambavision as oracle
from oracles.messages import run_without
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm import (
    EdgeEffects,
    Edges,
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    MambaAttribution,
    knock_out,
    report,
    trace,
)
from captum_ssm.errors import InputError, OptionError, UnsupportedMixerError
from captum_ssm.linear import FAMILY
from captum_ssm.tracing import Layer, repaired_scans

pytestmark = pytest.mark.mambavision

FLOAT32 = 1e-5
METHODS = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]
#: Image sizes whose maps are cut into whole windows, and sizes whose maps are filled up.
WHOLE, FILLED_UP = (96, 96), (75, 110)
SIZES = [WHOLE, FILLED_UP, (33, 190)]


def small_model(mambavision: Any, **options: Any) -> Any:
    """Maps of 6 x 6 and 3 x 3 tokens for images of 96 x 96, both in windows of 3 x 3."""
    small = {
        "dim": 4,
        "in_dim": 6,
        "depths": [1, 1, 3, 2],
        "num_heads": [1, 1, 2, 4],
        "window_size": [8, 8, 3, 3],
        "num_classes": 5,
    }
    return randomised(mambavision.mamba_vision_T(**small | options))


@torch.no_grad()
def randomised(model: nn.Module) -> Any:
    """Random parameters and statistics; convolutions keep the scale of what passes them."""
    randomise(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.copy_(torch.randn_like(module.weight) / module.weight[0].numel() ** 0.5)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.3 * torch.randn_like(module.running_mean))
            module.running_var.copy_(torch.rand_like(module.running_var) + 0.5)
    return model


def images(size: tuple[int, int], batch: int = 2, **options: Any) -> Tensor:
    return torch.randn(batch, 3, *size, **options)


def record(model: Any, *args: Any) -> list[Layer]:
    """The layers of a run, whose operators are made where a test asks for them."""
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args)
    return t.layers


# --- modules -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [
    {},
    {"qkv_bias": False},
    {"qk_scale": True},  # norms of queries and keys
    {"layer_scale": 0.5},
    {"window_size": [8, 8, 4, 2]},
])  # fmt: skip
def test_reproduces_the_modules(
    mambavision: Any, options: dict[str, Any], size: tuple[int, int]
) -> None:
    batch = 3 if size == FILLED_UP else 1
    model, pictures = small_model(mambavision, **options), images(size, batch)
    with torch.no_grad():
        with repaired_scans():  # a trace's own loops, to the last digit
            before = model(pictures)
        with trace(model) as t:
            assert torch.equal(model(pictures), before)
    assert [layer.name.split(".")[1] for layer in t.layers] == ["2"] * 3 + ["3"] * 2
    for layer in t.layers:
        assert layer.reconstruction_error() <= FLOAT32
        assert layer.values.shape[:2] == (batch, layer.tokens)
        assert layer.linear.mask is None


def test_error_of_the_median(mambavision: Any) -> None:
    errors: dict[type, list[float]] = {}
    for _ in range(5):
        for layer in record(small_model(mambavision), images(FILLED_UP)):
            errors.setdefault(type(layer.mixer.module), []).append(layer.reconstruction_error())
    assert len(errors) == 2
    for found in errors.values():
        assert statistics.median(found) <= 5e-7


@pytest.mark.parametrize("size", SIZES)
def test_matrices_times_values_are_the_output_in_the_map(
    mambavision: Any, size: tuple[int, int]
) -> None:
    """The windows are put together by the package's own function."""
    model = small_model(mambavision)
    for layer in record(model, images(size)):
        height, width = layer.map.size
        side = 3
        down, right = -(-height // side) * side, -(-width // side) * side
        real = mambavision.window_reverse(layer.output, side, down, right)
        real = real[:, :, :height, :width].flatten(2).mT.double()  # (B, L, E)
        matrices = layer.operator.dense(None).double()
        values, bias = layer.values.flatten(2).double(), layer.bias.flatten(2).double()
        y = torch.einsum("bcij,bjc->bic", matrices, values) + bias
        last = layer.mixer.module
        projection = last.proj if hasattr(last, "proj") else last.out_proj
        with torch.no_grad():
            assert relative_error(copy.deepcopy(projection).double()(y), real) <= FLOAT32
        if hasattr(last, "qkv"):  # all that is constant there is what padding contributes
            assert bool(bias.any()) == ((down, right) != (height, width))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("options", [
    {},
    {"bias": True, "conv_bias": 2},
    {"d_conv": 4, "d_state": 3},
    {"d_conv": 1, "expand": 2},
])  # fmt: skip
def test_mixer_by_itself(mambavision: Any, options: dict[str, Any]) -> None:
    small = {"d_model": 12, "d_state": 8, "d_conv": 3, "expand": 1}
    mixer = randomise(mambavision.MambaVisionMixer(**small | options))
    for batch, tokens in ((1, 1), (2, 2), (3, 7), (1, 49)):
        hidden = torch.randn(batch, tokens, 12)
        (layer,) = record(mixer, hidden)
        assert layer.reconstruction_error() <= FLOAT32
        assert layer.map is None
        wanted = oracle.mixer_matrices(mixer, hidden, PRESETS["exact"])
        assert relative_error(layer.operator.dense(None), wanted) <= FLOAT32


def test_a_stage_by_itself(mambavision: Any) -> None:
    stage = small_model(mambavision).levels[2]
    (first, *_) = record(stage, torch.randn(2, 16, 5, 7))
    assert first.map.size == (5, 7) and first.operator.shape[:2] == (2, 35)
    block = stage.blocks[0]
    (alone,) = record(block, torch.randn(4, 9, 16))
    assert alone.map is None and alone.operator.shape[:2] == (4, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precision(mambavision: Any, dtype: torch.dtype) -> None:
    model = small_model(mambavision).to(dtype)
    for layer in record(model, images(FILLED_UP, dtype=dtype)):
        half = dtype != torch.float64
        assert layer.operator.dtype == (torch.float32 if half else torch.float64)
        # the reference scan computes in float32 whatever the model
        assert layer.reconstruction_error() <= (3e-2 if half else 1e-6)
        module = copy.deepcopy(layer.mixer.module).double()
        with torch.no_grad():
            exact = layer.in_order(module(layer.call.args[0].double()))
        assert relative_error(layer.linear.output(), exact) <= (FLOAT32 if half else 1e-6)


def test_random_attention_is_refused(mambavision: Any) -> None:
    attention = randomise(mambavision.Attention(12, num_heads=3, attn_drop=0.2))
    (layer,) = record(attention, torch.randn(1, 4, 12))
    with pytest.raises(UnsupportedMixerError, match=r"attn_drop=0\.2.*Set attn_drop\.p = 0"):
        _ = layer.operator
    attention.fused_attn = False
    (layer,) = record(attention, torch.randn(1, 4, 12))
    assert layer.reconstruction_error() <= FLOAT32


# --- matrices ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [FILLED_UP, *full(WHOLE)])
@pytest.mark.parametrize("components", ["s6", "unified", "exact", "exact-conv", "exact-activation"])
def test_matrices(mambavision: Any, components: str, size: tuple[int, int]) -> None:
    model, pictures = small_model(mambavision), images(size)
    preset, *removed = components.split("-")
    layers = oracle.run(model, pictures)
    wanted = [layer.alpha(PRESETS[preset] - set(removed)) for layer in layers]
    method = ImplicitAttention(model)
    found = method.matrices(pictures, components=components)
    for matrix, alpha in zip(found, wanted, strict=True):
        assert relative_error(matrix, alpha.mean(1)) <= FLOAT32
    (largest,) = method.matrices(pictures, [0], "max", components, heads=[9, 0, -1])
    assert relative_error(largest, wanted[0][:, [9, 0, -1]].amax(1)) <= FLOAT32
    assert not found[0][:, 0, -1].any(), "the first and the last token share no window"


def test_the_second_half_of_the_channels_is_not_scanned(mambavision: Any) -> None:
    model = small_model(mambavision)
    method, pictures = ImplicitAttention(model), images(WHOLE)
    (alone,) = method.matrices(pictures, layers=[0], components="s6", reduce=None)
    assert torch.equal(alone[:, 8:], torch.eye(36).expand(2, 8, -1, -1))
    (scanned,) = method.matrices(pictures, [0], components="s6", heads=range(8))
    torch.testing.assert_close(scanned, alone[:, :8].mean(1))
    (convolved,) = method.matrices(pictures, layers=[0], reduce=None)
    beyond = (torch.arange(9)[:, None] - torch.arange(9)).abs() > 1
    inside = [t for t, window, _ in oracle.held((6, 6), 3) if window == 0]
    within = convolved[:, :, inside][..., inside]
    assert not within[:, 8:, beyond].any() and within[:, :8, beyond.tril()].all()


# --- methods across stages -----------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_rollout(mambavision: Any, size: tuple[int, int]) -> None:
    model, pictures = small_model(mambavision), images(size)
    layers = oracle.run(model, pictures)
    wanted = oracle.rollout(layers, [m.alpha(PRESETS["unified"]).mean(1) for m in layers])
    method = ImplicitAttentionRollout(model)
    found = method.attribute(pictures, per_token=True, verify=True)
    assert relative_error(found, wanted) <= FLOAT32
    pixels = method.attribute(pictures)
    bilinear = F.interpolate(found[:, None], size=size, mode="bilinear", align_corners=False)
    torch.testing.assert_close(pixels, bilinear.expand(-1, 3, -1, -1), rtol=0, atol=0)


@pytest.mark.parametrize("size", [WHOLE, FILLED_UP])
def test_rollout_with_rows_that_sum_to_one(mambavision: Any, size: tuple[int, int]) -> None:
    """Nothing is lost where the map becomes coarser."""
    model, pictures = small_model(mambavision), images(size)
    found = ImplicitAttentionRollout(model).attribute(
        pictures, normalize_rows=True, absolute=True, per_token=True
    )
    torch.testing.assert_close(found.sum((1, 2)), torch.ones(2))


@pytest.mark.parametrize("size", [WHOLE, FILLED_UP])
def test_mamba_attribution(mambavision: Any, size: tuple[int, int]) -> None:
    model, pictures = small_model(mambavision), images(size)
    layers = oracle.run(model, pictures, lambda output: output[0, 3] + output[1, 1])
    matrices = []
    for layer in layers:
        gradient = oracle.in_order(layer.gradient, layer.size, layer.side).mean(-1)
        alpha = layer.alpha(PRESETS["unified"]).mean(1)
        matrices.append((gradient[:, :, None] * alpha).clamp_min(0))
    found = MambaAttribution(model).attribute(pictures, target=[3, 1], per_token=True)
    assert relative_error(found, oracle.rollout(layers, matrices)) <= FLOAT32


def test_raw_attention(mambavision: Any) -> None:
    model, pictures = small_model(mambavision), images(FILLED_UP)
    layers = oracle.run(model, pictures)
    fine, coarse = layers[0].size, layers[-1].size
    spread = oracle.shares(fine, coarse)
    rows = []
    for layer in layers:
        alpha = layer.alpha(PRESETS["unified"]).mean(1)
        rows.append(alpha.mean(1) @ spread if layer.size == coarse else spread.mean(0) @ alpha)
    wanted = (sum(rows) / len(rows)).view(2, *fine)
    found = ImplicitAttention(model).attribute(pictures, per_token=True)
    assert relative_error(found, wanted) <= FLOAT32


def test_a_single_query_and_the_mean_over_all(mambavision: Any) -> None:
    model, pictures = small_model(mambavision), images(WHOLE)
    rollout = ImplicitAttentionRollout(model)
    found = rollout.attribute(pictures, per_token=True)
    assert torch.equal(found, rollout.attribute(pictures, query="mean", per_token=True))
    rows = [rollout.attribute(pictures, query=t, per_token=True) for t in range(9)]
    torch.testing.assert_close(sum(rows) / 9, found, rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("method", METHODS)
def test_some_layers(mambavision: Any, method: Any) -> None:
    model, pictures = small_model(mambavision), images(FILLED_UP)
    names = [layer.name for layer in record(model, pictures)]
    last_stage = method(model, layers=names[3:])
    grid = last_stage.attribute(pictures, target=1, per_token=True)
    assert grid.shape == (2, 3, 4)
    assert last_stage.attribute(pictures, target=1).shape == pictures.shape
    # layers that are left out still say where the tokens lie
    found = method(model).attribute(pictures, target=1, start_layer=3, per_token=True)
    wanted = grid.flatten(1).double() @ oracle.shares((5, 7), (3, 4))
    assert relative_error(found, wanted.view(2, 5, 7)) <= FLOAT32


@pytest.mark.parametrize("method", METHODS)
def test_one_example_or_several(mambavision: Any, method: Any) -> None:
    model, pictures = small_model(mambavision), images(FILLED_UP, 3)
    together = method(model).attribute(pictures, target=[0, 4, 2])
    assert together.shape == pictures.shape
    for i, target in enumerate((0, 4, 2)):
        alone = method(model).attribute(pictures[i : i + 1], target=target)
        assert relative_error(alone, together[i : i + 1]) <= FLOAT32
    parts = method(model).attribute(pictures, target=[0, 4, 2], internal_batch_size=2)
    assert relative_error(parts, together) <= FLOAT32


def test_the_published_recipe_needs_one_token_count(mambavision: Any) -> None:
    model, pictures = small_model(mambavision), images(WHOLE)
    for method in METHODS:
        with pytest.raises(OptionError, match=r"blocks\.2\.mixer' mixes 36 tokens .* 9\. Use"):
            method(model).attribute(pictures, target=1, recipe="published_code", query=4)
        last_stage = method(model, layers=["levels.3.blocks.0.mixer", "levels.3.blocks.1.mixer"])
        found = last_stage.attribute(
            pictures, target=1, recipe="published_code", query=4, per_token=True
        )
        assert found.shape == (2, 3, 3) and found.isfinite().all() and not found[:, 1, 1].any()


class PooledBetween(nn.Module):
    """Two stages with a mean over pairs of tokens between them, instead of a convolution."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.levels[2].downsample = None
        self.fine = nn.Sequential(model.patch_embed, *model.levels[:3])
        self.coarse = nn.Sequential(model.levels[3], model.norm, model.avgpool, nn.Flatten())
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        halved = F.avg_pool2d(self.fine(x), 2).repeat(1, 2, 1, 1)
        return self.head(self.coarse(halved))


@pytest.mark.parametrize("method", METHODS)
def test_a_change_of_tokens_that_nothing_explains(mambavision: Any, method: Any) -> None:
    model, pictures = PooledBetween(small_model(mambavision)).eval(), images(WHOLE)
    with pytest.raises(
        InputError, match=r"'fine.* mixes 36 tokens and layer 'coarse.* 9, .*layers="
    ):
        method(model).attribute(pictures, target=1)


@pytest.mark.full
def test_the_tiny_model(mambavision: Any) -> None:
    model = randomised(mambavision.mamba_vision_T())
    pictures = images((224, 224), 1)
    for layer in record(model, pictures):
        assert layer.reconstruction_error() <= FLOAT32
    found = MambaAttribution(model).attribute(pictures, target=7, per_token=True)
    assert found.shape == (1, 14, 14) and found.isfinite().all()


@pytest.mark.parametrize("size", [WHOLE, FILLED_UP])
def test_the_exact_flow_through_all_stages(mambavision: Any, size: tuple[int, int]) -> None:
    """Pixels and biases add up to the output, down-sampling and convolutions included."""
    model, pictures = small_model(mambavision), images(size)
    for rule in FAMILY:
        found = LatimFlow(model).decompose(pictures, target=1, rule=rule)
        with torch.no_grad():
            logits = model(pictures)
        assert (found.output - logits[:, 1]).abs().max() <= FLOAT32 * logits.abs().max()
        terms = found.inputs.flatten(1).abs().sum(1) + found.output.abs()
        terms = terms + sum(bias.abs() for bias in found.biases.values())
        assert found.inputs.shape == pictures.shape
        assert (found.delta.abs() <= FLOAT32 * terms).all()


# --- a report ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [WHOLE, FILLED_UP])
def test_a_report(mambavision: Any, size: tuple[int, int], tmp_path: Path) -> None:
    """Tokens are those of the first stage; later stages have maps at resolutions of their own."""
    model, pictures = small_model(mambavision), images(size)
    path = report(model, pictures, METHODS[1:], target=[1, 3], path=tmp_path / "report.html")
    page = read_page(path)
    with torch.no_grad():
        logits = model(pictures)
    for number, example in enumerate(page.facts["examples"]):
        target, picture = [1, 3][number], pictures[number : number + 1]
        wanted = METHODS[1](model).attribute(picture, per_token=True)[0]
        assert example["explained"] == f"the logit of “{target}”"
        said = {p["label"]: p["logit"] for p in example["predictions"]}
        assert said[str(target)] == pytest.approx(float(logits[number, target]), rel=1e-3, abs=1e-4)
        assert example["image"]["grid"] == list(wanted.shape)
        assert example["tokens"][-1] == f"row {len(wanted) - 1}, column {wanted.shape[1] - 1}"
        for method, kind in zip(example["methods"], METHODS[1:], strict=True):
            found = kind(model).attribute(picture, target=target, per_token=True)[0].flatten()
            shown = torch.tensor(method["values"])
            assert relative_error(shown, found) <= 1e-4  # five digits
        layers = example["maps"][0]["layers"]
        exact = ImplicitAttention(model).matrices(picture)
        assert [layer["size"] for layer in layers] == [len(matrix[0]) for matrix in exact]
        assert layers[0]["size"] == wanted.numel() > layers[-1]["size"]
        for layer, matrix in zip(layers, exact, strict=True):
            limit = matrix[0].abs().amax(-1, keepdim=True).numpy() / 254
            assert (abs(page.matrix(layer)[0] - matrix[0].numpy()) <= limit * 1.01 + 1e-6).all()


# --- single messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [WHOLE, FILLED_UP])
def test_messages_within_maps_are_cut(mambavision: Any, size: tuple[int, int]) -> None:
    """Positions number the tokens of a mixer's own map."""
    model, images = small_model(mambavision), torch.randn(2, 3, *size)
    with torch.no_grad(), trace(model) as record:
        model(images)
    for number in (0, len(record.layers) - 1):
        layer = record.layers[number]
        tokens = layer.operator.shape.tokens
        zeroed = torch.zeros(2, tokens, tokens, dtype=torch.bool)
        zeroed[:, 1, 0] = zeroed[1, tokens - 1, tokens - 1] = True
        expected, _ = run_without(model, images, {number: zeroed})
        own = torch.zeros(2, tokens, dtype=torch.bool)
        own[1, -1] = True
        with torch.no_grad(), knock_out(model, Edges(number, 0, 1), Edges(number, own, own)):
            found = model(images)
        assert relative_error(found, expected) <= FLOAT32
    with torch.no_grad(), knock_out(model, Edges("attention"), Edges("ssm")):
        silent = model(images)
    assert relative_error(silent, model(images).detach()) > FLOAT32


def test_effects_of_messages_within_maps(mambavision: Any) -> None:
    model, images = small_model(mambavision), torch.randn(2, 3, *FILLED_UP)
    effects = EdgeEffects(model).attribute(images, target=1)
    with trace(model, graph="outputs") as record:
        number = model(images)[:, 1]
    layer = record.layers[0]
    (gradient,) = torch.autograd.grad(number.sum(), layer.output)
    written = layer.linear.output() - layer.linear.project(layer.linear.bias)
    expected = (layer.in_order(gradient) * written).sum(-1)
    assert relative_error(effects.by_target(0), expected) <= 10 * FLOAT32
    assert relative_error(effects.matrix(0).sum(2), expected) <= 10 * FLOAT32
    with pytest.raises(InputError, match="no sum"):
        effects.matrix()
