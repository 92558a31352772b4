"""Layers that mix different tokens."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from torch import nn
from zoo.small import CLASSES, WIDTH, mamba_lm, randomise

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimNorm,
    MambaAttribution,
    register_mixer,
)
from captum_ssm.errors import InputError
from captum_ssm.mixers import LinearMixer
from captum_ssm.mixers.parts.token_map import Reduction, TokenMap, square_windows
from captum_ssm.operators import DenseHeads

pytestmark = pytest.mark.slow


class Halved(nn.Module):
    """The second block reads every other token."""

    def __init__(self):
        super().__init__()
        self.blocks = mamba_lm(num_hidden_layers=2).backbone.layers
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x)[:, ::2])
        return self.head(x[:, -1])


@pytest.mark.parametrize("method", [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution])
def test_tokens_lost_between_layers(method):
    model, x = randomise(Halved()), torch.randn(2, 9, WIDTH)
    with pytest.raises(InputError, match=r"s\.1\.mixer' reads others than all tokens .*layers="):
        method(model).attribute(x, target=1)
    # the advice of the message works
    last = method(model, layers=["blocks.1.mixer"]).attribute(x, target=1, per_token=True)
    assert last.shape == (2, 5)
    assert [len(m[0]) for m in ImplicitAttention(model).matrices(x)] == [9, 5]


class Weighted(nn.Module):
    """Mixes tokens by fixed weights."""

    def __init__(self, tokens):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(tokens, tokens))

    def forward(self, x):
        return self.weights @ x


class Stage(nn.Module):
    """Mixes the tokens of a square map."""

    def __init__(self, side, reduction):
        super().__init__()
        self.size, self.mixer = (side, side), Weighted(side**2)
        self.mixer.map = TokenMap(self.size, square_windows(self.size, side, "cpu"), reduction)

    def forward(self, x):
        tokens = x.flatten(2).mT
        return (tokens + self.mixer(tokens)).mT.unflatten(2, self.size)


class Coarser(nn.Module):
    """A stage of 4 x 4 tokens, and one of the 2 x 2 that a convolution makes of them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 2, 2)
        self.fine, self.coarse = Stage(4, Reduction(self.conv, (4, 4))), Stage(2, None)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.coarse(self.conv(self.fine(x.mT.unflatten(2, (4, 4)))))
        return self.head(x.mean((2, 3)))


def weighted(mixer, call):
    def project(y):
        return y.squeeze(-1)

    operator = DenseHeads(
        mixer.weights[None, None].expand(len(call.hidden_states), WIDTH, -1, -1), 1
    )
    return LinearMixer(call.hidden_states[..., None], operator, project, map=mixer.map)


def test_norms_across_a_map_that_becomes_coarser():
    """The rows of each layer, over the tokens of the first."""
    register_mixer(Weighted, weighted)
    model, x = Coarser(), torch.randn(3, 16, WIDTH)
    fine, coarse = LatimNorm(model).maps(x)
    spread = model.fine.mixer.map.reduction.spread(torch.eye(4))  # what a coarse token is made of
    for start, layers in ((0, [coarse @ spread, spread @ fine]), (1, [coarse @ spread])):
        for query, rows in (("mean", slice(None)), (2, [2])):
            wanted = sum(layers)[:, rows].mean(1) / len(layers)
            found = LatimNorm(model).attribute(x, query=query, start_layer=start, per_token=True)
            assert found.shape == (3, 16)
            assert relative_error(found, wanted) <= 1e-5
