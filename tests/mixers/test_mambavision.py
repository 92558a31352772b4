"""MambaVision: mixer, attention, windows, and methods across its stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import contract
from helpers.contract import check, record
from oracles import mambavision as oracle
from oracles import relative_error
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm import ImplicitAttentionRollout, LatimFlow, trace
from captum_ssm.errors import InputError, UnsupportedMixerError
from captum_ssm.linear import FAMILY
from captum_ssm.tracing import repaired_scans

pytestmark = pytest.mark.timm

FLOAT32 = 1e-5
#: Image sizes whose maps are cut into whole windows, and sizes whose maps are filled up.
WHOLE, FILLED_UP = (96, 96), (75, 110)


def small_model(mambavision: Any, **options: Any) -> Any:
    """Maps of 6 x 6 and 3 x 3 tokens for images of 96 x 96, both in windows of 3 x 3."""
    small = {
        "dim": 4, "in_dim": 6, "depths": [1, 1, 3, 2], "num_heads": [1, 1, 2, 4],
        "window_size": [8, 8, 3, 3], "num_classes": 5,
    }  # fmt: skip
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


# --- modules -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [FILLED_UP, (33, 190)])
@pytest.mark.parametrize("options", [
    {"qkv_bias": False, "qk_scale": True},  # norms of queries and keys
    {"layer_scale": 0.5, "window_size": [8, 8, 4, 2]},
])  # fmt: skip
def test_reproduces_the_modules(
    mambavision: Any, options: dict[str, Any], size: tuple[int, int]
) -> None:
    model, pictures = small_model(mambavision, **options), images(size, 3)
    with torch.no_grad():
        with repaired_scans():  # a trace's own loops, to the last digit
            before = model(pictures)
        with trace(model) as t:
            assert torch.equal(model(pictures), before)
    assert [layer.name.split(".")[1] for layer in t.layers] == ["2"] * 3 + ["3"] * 2
    for layer in t.layers:
        check(layer)
        assert layer.values.shape[:2] == (3, layer.tokens)
        assert layer.linear.mask is None
    for rule in FAMILY:  # pixels and biases add up, down-sampling and convolutions included
        found = LatimFlow(model).decompose(pictures, target=1, rule=rule)
        terms = found.inputs.flatten(1).abs().sum(1) + found.output.abs()
        terms = terms + sum(bias.abs() for bias in found.biases.values())
        assert (found.delta.abs() <= FLOAT32 * terms).all()


@pytest.mark.parametrize("size", [WHOLE, FILLED_UP])
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
    {"bias": True, "conv_bias": 2},
    {"d_conv": 4, "d_state": 3},
    {"d_conv": 1, "expand": 2},
])  # fmt: skip
def test_contract(mambavision: Any, options: dict[str, Any]) -> None:
    def matrices(mixer: Any, hidden: Tensor, _: Any) -> Tensor:
        # the reference scan computes in float32
        return oracle.mixer_matrices(mixer, hidden).float()

    small = {"d_model": 12, "d_state": 8, "d_conv": 3, "expand": 1}
    contract.holds(randomise(mambavision.MambaVisionMixer(**small | options)), 12, matrices)


def test_random_attention_is_refused(mambavision: Any) -> None:
    attention = randomise(mambavision.Attention(12, num_heads=3, attn_drop=0.2))
    (layer,) = record(attention, torch.randn(1, 4, 12))
    with pytest.raises(UnsupportedMixerError, match=r"attn_drop=0\.2.*Set attn_drop\.p = 0"):
        _ = layer.operator
    attention.fused_attn = False
    check(*record(attention, torch.randn(1, 4, 12)))


# --- methods across stages -----------------------------------------------------------------


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


def test_a_change_of_tokens_that_nothing_explains(mambavision: Any) -> None:
    model, pictures = PooledBetween(small_model(mambavision)).eval(), images(WHOLE)
    with pytest.raises(
        InputError, match=r"'fine.* mixes 36 tokens, but layer 'coarse.* mixes 9, .*layers="
    ):
        ImplicitAttentionRollout(model).attribute(pictures)
