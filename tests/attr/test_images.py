"""Images: patch grids, other tokens among the patches, pixels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.every_method import each_method, each_of_queries
from oracles.dense import UNIFIED, Run, add_identity, error, query_row, rollout
from torch import nn
from zoo.small import CLASSES, WIDTH, images, mamba_lm, mixers_of, randomise, vision

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution

pytestmark = pytest.mark.slow

FOLDS = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]


@pytest.mark.parametrize(("cls", "grid"), [("middle", (5, 2)), (None, (1, 6))])
@each_of_queries
def test_pixels_are_bilinear_in_the_patch_grid(method, grid, cls):
    model, pictures = vision(cls, grid), images(2, grid)
    options = {"target": [1, 3], "query": "last"}
    patches = method(model).attribute(pictures, per_token=True, **options)
    assert patches.shape == (2, *grid)
    pixels = method(model).attribute(pictures, **options)
    assert pixels.shape == pictures.shape == (2, 3, 4 * grid[0], 3 * grid[1])
    expected = F.interpolate(
        patches[:, None], size=pictures.shape[-2:], mode="bilinear", align_corners=False
    )
    for colour in range(3):
        torch.testing.assert_close(pixels[:, colour], expected[:, 0], rtol=0, atol=0)
    assert pixels.is_contiguous()


@pytest.mark.parametrize("cls", ["head", "middle", None])
def test_patches_are_laid_out_row_by_row(cls):
    model, pictures = vision(cls, (3, 4)), images(2, (3, 4))
    alphas = Run(model, pictures).alphas(UNIFIED)
    last = alphas[0].shape[-1] - 1
    row = query_row(rollout([add_identity(alpha) for alpha in alphas]), last)
    expected = row[:, model.patch_tokens()].view(2, 3, 4)
    found = ImplicitAttentionRollout(model).attribute(pictures, query="last", per_token=True)
    assert error(found, expected) <= 1e-5


def test_the_last_patch_before_the_cls_token_sees_no_later_patch():
    model, pictures = vision("middle", (3, 4)), images(1, (3, 4))
    found = ImplicitAttentionRollout(model).attribute(pictures, per_token=True)
    assert found.flatten()[:6].all()
    assert not found.flatten()[6:].any()


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = mixer

    def forward(self, x):
        return x + self.mixer(hidden_states=self.norm(x))


class WithRegisters(nn.Module):
    """Two registers and a cls token among the patches; mixers in blocks, or in a plain list."""

    def __init__(self, in_blocks):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.GELU(), nn.Conv2d(6, WIDTH, (4, 3), (4, 3))
        )
        self.extra = nn.Parameter(torch.zeros(1, 3, WIDTH))
        mixers = mixers_of(mamba_lm(num_hidden_layers=2))
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Block(m) for m in mixers] if in_blocks else mixers)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.stem(images).flatten(2).transpose(1, 2)
        e = self.extra.expand(len(x), -1, -1)
        x = torch.cat([e[:, :1], x[:, :5], e[:, 1:2], x[:, 5:9], e[:, 2:], x[:, 9:]], dim=1)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Block) else x + layer(self.norm(x))
        return self.head(x[:, 11])

    patch_tokens = (*range(1, 6), *range(7, 11), *range(12, 15))


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("method", FOLDS)
def test_other_tokens_among_the_patches_are_told_apart(method, in_blocks):
    model, pictures = randomise(WithRegisters(in_blocks)), images(2, (3, 4))
    options = {"target": [1, 3], "per_token": True}
    found = method(model).attribute(pictures, **options)
    assert found.shape == (2, 3, 4)
    assert torch.equal(found, method(model).attribute(pictures, query=11, **options))
    alphas = Run(model, pictures).alphas(UNIFIED)
    if method is ImplicitAttention:
        row = sum(alphas)[:, 11] / 2
    else:
        row = rollout([add_identity(alpha) for alpha in alphas])[:, 11]
    seen = [t < 11 for t in model.patch_tokens]  # the cls token is the twelfth
    assert torch.equal(found.flatten(1) != 0, torch.tensor(seen).expand(2, -1)) or (
        method is MambaAttribution  # which clamps
    )
    if method is not MambaAttribution:
        assert error(found, row[:, model.patch_tokens].view(2, 3, 4)) <= 1e-5


@pytest.mark.parametrize("cls", ["head"])
@each_of_queries
def test_some_layers_only(method, cls):
    """Later layers alone: their streams mix the patches into every other token."""
    model, pictures = vision(cls, layers=3), images(2)
    some = method(model, layers=["blocks.1.mixer", "blocks.2.mixer"])
    options = {"target": 2, "query": "last", "per_token": True}
    found = some.attribute(pictures, **options)
    torch.testing.assert_close(found, method(model).attribute(pictures, start_layer=1, **options))


@each_method
def test_one_colour_channel(method):
    model = vision("middle")
    model.patch = randomise(nn.Conv2d(1, WIDTH, (4, 3), (4, 3)))
    found = method(model).attribute(torch.randn(2, 1, 12, 12), target=0)
    assert found.shape == (2, 1, 12, 12)


@each_method
def test_channels_last_images(method):
    model, pictures = vision("middle"), images(2)
    expected = method(model).attribute(pictures, target=0)
    found = method(model).attribute(pictures.to(memory_format=torch.channels_last), target=0)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# --- errors --------------------------------------------------------------------------------------


class NoConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = vision(None)
        self.inner.patch = nn.Identity()
        self.embed = nn.Linear(36, WIDTH)

    def forward(self, images):
        x = images.unfold(2, 4, 4).unfold(3, 3, 3)  # (B, 3, h, w, 4, 3)
        x = self.embed(x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(x.mean(1))


class Merged(nn.Module):
    """Pairs of patches become one token after the convolution."""

    def __init__(self):
        super().__init__()
        self.inner = vision(None, (3, 2))

    def forward(self, images):
        x = self.inner.patch(images).flatten(2).transpose(1, 2)
        x = (x[:, ::2] + x[:, 1::2]) / 2
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(x.mean(1))


@each_of_queries
def test_no_convolution(method):
    with pytest.raises(ValueError, match=r"\(2, 3, 12, 12\) look like images.*no 2-D convolution"):
        method(NoConvolution().eval()).attribute(images(2), target=0)


@each_of_queries
def test_a_grid_that_is_not_the_tokens(method):
    with pytest.raises(ValueError, match=r"6 tokens.*grid is 3 x 4.*per_token=True"):
        method(Merged().eval()).attribute(images(2), target=0)
    found = method(Merged().eval()).attribute(images(2), target=0, per_token=True)
    assert found.shape == (2, 6)
