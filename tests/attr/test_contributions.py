"""Contribution vectors: they are the loop's, and add up to what the module returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.latim_vectors import a_model, all_vectors, layer_of, record
from helpers.versions import not_in_4
from oracles import latim as oracle
from oracles import mamba2_formula, relative_error, vim
from torch import Tensor
from zoo import mamba2
from zoo.mamba import padded_batch, randomise, transformers_model

from captum_ssm.attr.vectors import contributions
from captum_ssm.attr.vectors.contributions import Contributions, tiles
from captum_ssm.attr.vectors.taps import ACTIVATIONS
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.models.vim import VimMixer
from captum_ssm.operators import (
    Chain,
    DenseHeads,
    FeedbackRecurrence,
    HeadCentering,
    Shape,
    ShortConv,
)
from captum_ssm.tracing import Layer
from captum_ssm.tracing.way import Step

# float32 against the module, for any draw of the parameters; typical is 2e-7
FLOAT32 = 1e-5
EXACT = 1e-12


# --- the sum is the output ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jamba", "lfm2", "bamba"])
def test_padding_contributes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    not_in_4(name, "lfm2")
    case = a_model(name, monkeypatch)
    ids, mask = padded_batch([9, 4, 1], 15)
    for layer in record(case.model, ids, attention_mask=mask):
        found = all_vectors(layer)
        with torch.no_grad():
            constant = Contributions(layer).constant()
        assert relative_error(found.sum(2) + constant, layer.output) <= FLOAT32, layer.name
        assert not found.transpose(1, 2)[mask == 0].any(), layer.name
        # in the context of real tokens the example's own vectors
        for row, length in enumerate([9, 4, 1]):
            own = record(case.model, ids[row : row + 1, 9 - length :])
            alone = all_vectors(next(one for one in own if one.name == layer.name))
            # later layers of the two runs read streams that differ by rounding
            assert relative_error(found[row : row + 1, -length:, -length:], alone) <= 10 * FLOAT32


# --- the vectors are the loop's -----------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_mamba_1(family: str, bias: bool, activation: str) -> None:
    """With biases, padding leaks into the convolution's; kernel 4 and single tokens included."""
    model = transformers_model(family, use_bias=bias).double()
    ids, mask = padded_batch([7, 3, 1])
    for layer in record(model, ids, attention_mask=mask):
        hidden = layer.call.hidden_states
        wanted = oracle.mamba1(layer.mixer.module, hidden, activation, mask)
        assert relative_error(all_vectors(layer, activation), wanted) <= EXACT
        check_total(layer, activation, wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_mamba_2_with_groups_and_norms(family: str, activation: str) -> None:
    model = mamba2.make_model(family).double()
    ids, mask = padded_batch([6, 3])
    names = mamba2.mixer_names(model)
    for layer in record(model, ids, attention_mask=mask):
        if layer.name not in names:
            continue
        form = mamba2_formula.form_of(layer.mixer.module, model.config)
        hidden = layer.call.hidden_states
        wanted = oracle.mamba2(layer.mixer.module, hidden, form, activation, mask)
        assert relative_error(all_vectors(layer, activation), wanted) <= EXACT
        check_total(layer, activation, wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_both_directions_of_vision_mamba(tokens: int, activation: str) -> None:
    mixer = VimMixer(5, d_state=3, bimamba_type="v2", if_divide_out=True)
    mixer = vim.randomise(mixer).double()
    (layer,) = record(mixer, torch.randn(2, tokens, 5).double())
    wanted = oracle.vim(mixer, layer.call.hidden_states, activation)
    assert relative_error(all_vectors(layer, activation), wanted) <= EXACT
    check_total(layer, activation, wanted)


def check_total(layer: Layer, activation: str, wanted: Tensor) -> None:
    """The sum over sources without tiles, and constants that are the output projection's own."""
    with torch.no_grad():
        parts = Contributions(layer, activation)
        assert relative_error(parts.total(), wanted.sum(2)) <= EXACT
        if activation != "linearized":  # the convolution's bias belongs to tokens
            bias = layer.mixer.module.out_proj.bias
            bias = torch.zeros(()).double() if bias is None else bias
            assert (parts.constant() - bias).abs().max() <= EXACT


# --- tiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 100, 2000])
@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "rwkv6", "rwkv7", "vim", "gpt_neox"])
def test_tiles_of_any_size(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_model(name, monkeypatch)
    layers = record(case.model, case.inputs)
    for activation in ("linearized", "silu"):
        whole = [all_vectors(layer, activation) for layer in layers]
        with monkeypatch.context() as patch:
            patch.setattr(contributions, "_TILE_ELEMENTS", elements)
            for layer, wanted in zip(layers, whole, strict=True):
                assert relative_error(all_vectors(layer, activation), wanted) <= FLOAT32


def test_tiles_hold_what_they_may() -> None:
    model, ids = transformers_model(hidden_size=8), torch.randint(19, (2, 40))
    layer = record(model, ids)[0]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(contributions, "_TILE_ELEMENTS", 2 * 40 * 16 * 3)
        patch.setattr(contributions, "_MANY_QUERIES", 41)
        sizes = []
        for tile in tiles([Contributions(layer)], torch.arange(40).expand(2, -1)):
            count = tile.queries.stop - tile.queries.start
            assert count <= 3 and tile.vectors.shape[:2] == (2, count)
            sizes.append(tile.sources)
    # sources after all queries of a tile are left out: the mixer is causal
    assert [part.stop for part in sizes] == [*range(3, 40, 3), 40]
    assert all(part.start == 0 for part in sizes)


def test_tiles_that_do_not_fit_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = transformers_model(hidden_size=8), torch.randint(19, (2, 13))
    layer = record(model, ids)[0]
    monkeypatch.setattr(contributions, "_MANY_QUERIES", 14)
    wanted, before, sizes = all_vectors(layer), Contributions.before_projection, []

    def scarce(self: Contributions, index: torch.Tensor) -> torch.Tensor:
        if index.shape[1] > 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        sizes.append(index.shape[1])
        return before(self, index)

    monkeypatch.setattr(Contributions, "before_projection", scarce)
    assert relative_error(all_vectors(layer), wanted) <= FLOAT32
    assert sum(sizes) == 13 and max(sizes) == 3


def test_some_queries() -> None:
    model = transformers_model()
    ids, mask = padded_batch([9, 5, 2])
    layer = record(model, ids, attention_mask=mask)[1]
    whole = all_vectors(layer)
    index = torch.tensor([[8, 0], [7, 7], [4, 8]])
    found = all_vectors(layer, queries=index)
    for row in range(3):
        assert relative_error(found[row], whole[row, index[row]]) <= 1e-6
    assert not found[2, 0].any()  # padding


def test_parallel_mixers_add_up() -> None:
    layers = record(mamba2.make_model("falcon_h1"), torch.randint(19, (2, 7)))
    together = [layer for layer in layers if layer.block is layers[0].block]
    assert len(together) == 2
    index = torch.arange(7).expand(2, -1)
    scales = [layer.linear.branch_scale for layer in together]
    assert len({*scales, 1.0}) == 3
    wanted = sum(s * all_vectors(layer) for s, layer in zip(scales, together, strict=True))
    stream = torch.randn(2, 7, 12)
    found = torch.zeros(2, 7, 7, 12)
    with torch.no_grad():
        parts = [
            Contributions(layer, way=[Step(s)]) for s, layer in zip(scales, together, strict=True)
        ]
        for tile in tiles(parts, index, stream):
            found[:, tile.queries, tile.sources] = tile.vectors
    wanted[:, range(7), range(7)] += stream
    assert relative_error(found, wanted) <= 1e-6


# --- output projections -------------------------------------------------------------------------


def test_the_output_projection_may_be_any_module() -> None:
    """A LoRA adapter, a bias, and few tokens to find many channels with."""
    peft = pytest.importorskip("peft")
    model = transformers_model(use_bias=True, num_hidden_layers=1)
    layers = model.backbone.layers
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["out_proj"], lora_dropout=0.0)
    peft.inject_adapter_in_model(config, layers)
    for name, parameter in layers.named_parameters():
        if "lora_" in name:
            parameter.data = 0.5 * torch.randn(parameter.shape)
    projection = layers[0].mixer.out_proj
    (layer,) = record(model, torch.randint(19, (1, 3)))
    up, down = projection.lora_B["default"].weight, projection.lora_A["default"].weight
    wanted = projection.base_layer.weight + 1.5 * up @ down
    with torch.no_grad():
        parts = Contributions(layer)
        assert relative_error(parts.weight, wanted.T) <= 1e-6
        assert relative_error(parts.total() + parts.constant(), layer.output) <= FLOAT32


def test_constants_beside_the_values_do_not_round(mamba_ssm: Any) -> None:
    """Mamba2 passes channels that are not mixed to out_proj as well, however large."""
    mixer = mamba_ssm.make_mamba2(8, d_ssm=8, headdim=4, d_state=3, ngroups=1)
    (layer,) = record(randomise(mixer), 30 * torch.randn(2, 6, 8))
    with torch.no_grad():
        parts = Contributions(layer)
        assert relative_error(parts.weight, mixer.out_proj.weight.T[-8:]) <= 1e-6
        assert relative_error(parts.total() + parts.constant(), layer.output) <= FLOAT32
    assert parts.constant().abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    model = transformers_model().to(dtype)
    for layer in record(model, torch.randint(19, (2, 6))):
        for activation in ("linearized", "silu"):
            assert all_vectors(layer, activation).dtype == torch.float32
        with torch.no_grad():
            parts = Contributions(layer)
            found = parts.total() + parts.constant()
        assert relative_error(found, layer.linear.output()) <= FLOAT32


# --- operators that mix channels ----------------------------------------------------------------


def test_channels_may_not_be_mixed_before_tokens() -> None:
    attention = DenseHeads(torch.rand(2, 3, 4, 4), 5)
    centering = HeadCentering(attention.shape, torch.zeros(()))
    values = all_vectors(layer_of(Chain(centering, attention), None))
    assert values.any()
    with pytest.raises(UnsupportedMixerError, match="DenseHeads acts after channels were mixed"):
        all_vectors(layer_of(Chain(attention, centering), None))


def test_channels_mixed_at_every_step() -> None:
    """Of each pair of tokens, a matrix of channels; behind it a norm, before it a convolution."""
    shape = Shape(2, 5, 3, 4)
    scan = FeedbackRecurrence(*torch.rand(3, *shape), torch.randn(3, 4, 4))
    conv = ShortConv(torch.randn(3, 4, 2), shape)
    layer = layer_of(Chain(HeadCentering(shape, scan.decay), scan, conv), None)
    values = layer.linear.values
    found = all_vectors(layer)  # (B, L, L, C)
    for source in range(5):
        alone = torch.zeros_like(values)
        alone[:, source] = values[:, source]
        sent = layer.linear.operator.apply(alone).flatten(2)  # (B, L, C)
        assert relative_error(found[:, :, source], sent) <= FLOAT32
    behind = Chain(scan, HeadCentering(shape, scan.decay))
    with pytest.raises(UnsupportedMixerError, match="FeedbackRecurrence acts after channels"):
        all_vectors(layer_of(behind, None))


def test_centering_alone() -> None:
    shape = torch.Size([2, 4, 3, 5])
    layer = layer_of(
        HeadCentering(DenseHeads(torch.rand(2, 3, 4, 4), 5).shape, torch.zeros(())), None
    )
    found = all_vectors(layer)
    values = layer.linear.values
    assert values.shape == shape
    wanted = (values - values.mean(-1, keepdim=True)).flatten(2)
    assert relative_error(found.diagonal(dim1=1, dim2=2).transpose(1, 2), wanted) <= 1e-6
    assert found.any(-1).sum() == 8
