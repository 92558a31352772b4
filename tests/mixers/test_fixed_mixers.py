"""Theorem 1 of the hidden-attention paper, held against real layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.contract import record_one
from oracles.mixing import TOKENS, observe
from torch import Tensor
from zoo.mamba import randomise, transformers_model

from captum_ssm.operators import Mixing

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

WIDTH = 5


def mamba() -> Any:
    return transformers_model("mamba").backbone.layers[0].mixer


def lfm2() -> Any:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = transformers.Lfm2Config(hidden_size=WIDTH, num_attention_heads=1, num_hidden_layers=1)
    return randomise(Lfm2ShortConv(config, 0))


def attention() -> Any:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = transformers.GPT2Config(n_embd=6, n_head=3, n_layer=1, attn_implementation="sdpa")
    return randomise(GPT2Attention(config, layer_idx=0))


#: Layers, their input's width, what the theorem says.
LAYERS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "LFM2": (lfm2, WIDTH, "gated"),
    "Mamba": (mamba, WIDTH, "controlled"),
    "attention": (attention, 6, "controlled"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_theorem_1(name: str) -> None:
    """The word is what the matrices of the real layer show at several inputs."""
    make, width, mixing = LAYERS[name]
    module = make().double()

    def draw() -> Tensor:
        return torch.randn(2, TOKENS, width, dtype=torch.float64)

    operator = record_one(module, draw()).operator
    assert operator.mixing is Mixing(mixing)
    assert operator.mixes_tokens and operator.data_dependent == (mixing != "fixed")

    def matrices(hidden: Tensor) -> Tensor:
        return record_one(module, hidden).operator.per_channel().dense(None)

    assert observe(matrices, draw).word == mixing


@pytest.mark.parametrize(
    ("components", "mixing"),
    [
        ({"scan", "gate", "conv", "activation", "skip"}, "controlled"),
        ({"gate", "conv", "activation", "skip"}, "gated"),
        ({"conv", "skip"}, "fixed"),
        ({"gate", "activation"}, "none"),
    ],
)
def test_mamba_without_its_scan_mixes_no_more_than_its_convolution(
    components: set[str], mixing: str
) -> None:
    mixer = record_one(mamba(), torch.randn(2, TOKENS, WIDTH)).linear.restrict(components)
    assert mixer.operator.mixing is Mixing(mixing)


def test_padding_is_no_data() -> None:
    """Which tokens are padding does not make a convolution data-dependent."""
    hidden, mask = torch.randn(2, TOKENS, WIDTH), torch.ones(2, TOKENS)
    mask[0, :3] = 0
    layer = record_one(lfm2(), hidden, attention_mask=mask)
    assert layer.linear.mask is not None
    without_gates = layer.linear.restrict({"conv"}).operator
    assert without_gates.mixing is Mixing.FIXED and layer.operator.mixing is Mixing.GATED
