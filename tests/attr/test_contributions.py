"""Contribution vectors: their norms are those of the loop's vectors, and they add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.latim_vectors import all_vectors, layer_of
from oracles import latim as oracle
from oracles import mamba2_formula, relative_error, vim
from torch import Tensor
from zoo import architectures, mamba2
from zoo.mamba import padded_batch, randomise, transformers_model

from captum_ssm import LatimNorm, trace
from captum_ssm.attr.vectors import contributions
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

pytestmark = pytest.mark.slow

# float32 against the module, for any draw of the parameters; typical is 2e-7
FLOAT32 = 1e-5
EXACT = 1e-12
CHOICES = ["linearized", "silu", "taylor2", "relu", "identity"]


def layers_of(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model) as t:
        model(*args, **kwargs)
    return list(t.layers)


def masked(model: Any) -> Callable[..., Tensor]:
    """The model, whose second argument is the mask."""
    return lambda ids, mask: model(ids, attention_mask=mask).logits


def of_real(vectors: Tensor, mask: Tensor) -> Tensor:
    """The norms of vectors (B, L, L, E) whose tokens are no padding."""
    keep = mask.to(vectors)
    return vectors.norm(dim=-1) * keep[:, :, None] * keep[:, None]


# --- the vectors are the loop's -----------------------------------------------------------------


@pytest.mark.parametrize("activation", CHOICES)
@pytest.mark.parametrize("bias", [False, True])
def test_falcon_mamba(bias: bool, activation: str) -> None:
    """With biases, padding leaks into the convolution's; kernel 4 and single tokens included."""
    model = transformers_model("falcon_mamba", use_bias=bias).double()
    ids, mask = padded_batch([7, 3, 1])
    found = LatimNorm(model, activation=activation).maps(ids, additional_forward_args=mask)
    for layer, one in zip(layers_of(model, ids, attention_mask=mask), found, strict=True):
        wanted = oracle.mamba1(layer.mixer.module, layer.call.hidden_states, activation, mask)
        assert relative_error(one, of_real(wanted, mask)) <= EXACT


@pytest.mark.parametrize("activation", CHOICES)
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_mamba_2_with_groups_and_norms(family: str, activation: str) -> None:
    model = mamba2.make_model(family).double()
    ids, mask = padded_batch([6, 3])
    names = mamba2.mixer_names(model)
    method = LatimNorm(masked(model), model, activation=activation)
    found = method.maps(ids, additional_forward_args=mask)
    for layer, one in zip(layers_of(model, ids, attention_mask=mask), found, strict=True):
        if layer.name not in names:
            continue
        form = mamba2_formula.form_of(layer.mixer.module, model.config)
        hidden = layer.call.hidden_states
        wanted = oracle.mamba2(layer.mixer.module, hidden, form, activation, mask)
        assert relative_error(one, of_real(wanted, mask)) <= EXACT


@pytest.mark.parametrize("activation", CHOICES)
@pytest.mark.parametrize("tokens", [1, 8])
def test_both_directions_of_vision_mamba(tokens: int, activation: str) -> None:
    mixer = VimMixer(5, d_state=3, bimamba_type="v2", if_divide_out=True)
    mixer = vim.randomise(mixer).double()
    hidden = torch.randn(2, tokens, 5).double()
    (found,) = LatimNorm(mixer, activation=activation).maps(hidden)
    wanted = oracle.vim(mixer, hidden, activation)
    assert relative_error(found, wanted.norm(dim=-1)) <= EXACT


def test_constants_beside_the_values_do_not_round(mamba_ssm: Any) -> None:
    """Mamba2 passes channels that are not mixed to out_proj as well, however large."""
    mixer = mamba_ssm.make_mamba2(8, d_ssm=8, headdim=4, d_state=3, ngroups=1)
    (error,) = LatimNorm(randomise(mixer)).decomposition_error(30 * torch.randn(2, 6, 8))
    assert error <= FLOAT32


# --- tiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "gpt_neox", "vim"])
def test_tiles_of_any_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.ZOO[name](monkeypatch)
    whole = LatimNorm(case.model).maps(case.inputs)
    for elements in (1, 100, 2000):
        monkeypatch.setattr(contributions, "_TILE_ELEMENTS", elements)
        for found, wanted in zip(LatimNorm(case.model).maps(case.inputs), whole, strict=True):
            assert relative_error(found, wanted) <= FLOAT32


def test_tiles_that_do_not_fit_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = transformers_model(hidden_size=8), torch.randint(19, (2, 13))
    monkeypatch.setattr(contributions, "_MANY_QUERIES", 14)
    wanted, sizes = LatimNorm(model).maps(ids), []
    before = contributions.Contributions.before_projection

    def scarce(self: contributions.Contributions, index: Tensor) -> Tensor:
        if index.shape[1] > 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        sizes.append(index.shape[1])
        return before(self, index)

    monkeypatch.setattr(contributions.Contributions, "before_projection", scarce)
    for one, other in zip(LatimNorm(model).maps(ids), wanted, strict=True):
        assert relative_error(one, other) <= FLOAT32
    assert sum(sizes) == 2 * 13 and max(sizes) == 3


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
