"""Images: how patches are found among a model's tokens, and pixels of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.every_method import each_method, each_of_queries
from oracles.dense import UNIFIED, Run, add_identity, error, rollout
from torch import Tensor, nn
from zoo.small import CLASSES, GRID, WIDTH, images, mamba_lm, mixers_of, randomise, vision

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, LatimFlow, MambaAttribution
from captum_ssm.errors import InputError

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


class Stemmed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 3, kernel_size=1), inner

    def forward(self, pictures: Tensor) -> Tensor:
        return self.inner(self.stem(pictures))


@each_method
def test_the_last_convolution_before_the_first_block_counts(method: Any) -> None:
    model, pictures = Stemmed(vision(None)).eval(), images(2)
    found = method(model).attribute(pictures, target=1, per_token=True)
    assert found.shape == (2, *GRID)


@pytest.mark.parametrize("size", [(12, 12), (14, 13)])
def test_pixels_are_summed_over_the_cells_they_lie_in(size: tuple[int, int]) -> None:
    model, pictures = vision(None).double(), torch.randn(2, 3, *size).double()
    pixels = LatimFlow(model).attribute(pictures, target=1)
    wanted = torch.zeros(2, *GRID, dtype=torch.float64)
    for y in range(size[0]):
        for x in range(size[1]):
            wanted[:, y * GRID[0] // size[0], x * GRID[1] // size[1]] += pixels[:, :, y, x].sum(1)
    found = LatimFlow(model).attribute(pictures, target=1, per_token=True)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


class Through(nn.Module):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.inner, self.read = vision(None), read
        self.row = Sequenced(3, WIDTH, (4, 3), (4, 3))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.read(self, pictures)
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(x.mean(1))


class Sequenced(nn.Conv2d):
    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image).flatten(2).mT


def unfolded(model: Any, pictures: Tensor) -> Tensor:
    x = pictures.unfold(2, 4, 4).unfold(3, 3, 3).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    return x @ model.inner.patch.weight.flatten(1).T


def pairs(model: Any, pictures: Tensor) -> Tensor:
    x = model.inner.patch(pictures).flatten(2).mT
    return (x[:, ::2] + x[:, 1::2]) / 2


#: How a model reads an image, a method, and its refusal.
READS: dict[str, tuple[Any, Any, str]] = {
    "no convolution": (
        unfolded,
        ImplicitAttention,
        r"\(2, 3, 12, 12\) are treated.*no 2-D convolution",
    ),
    "patches in a row": (lambda m, x: m.row(x), LatimFlow, "2-D convolution that makes patches"),
    "pairs of patches": (
        pairs,
        ImplicitAttention,
        r"grid is 3 x 4, but 6 of its 6 tokens.*per_token=True",
    ),
}


@pytest.mark.parametrize("name", READS)
def test_tokens_that_are_no_grid(name: str) -> None:
    read, method, said = READS[name]
    explain = method(Through(read).eval())
    with pytest.raises(InputError, match=said):
        explain.attribute(images(2), target=0, per_token=method is LatimFlow)
    if name == "pairs of patches":
        assert explain.attribute(images(2), target=0, per_token=True).shape == (2, 6)
