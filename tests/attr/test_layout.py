"""How patches are found among a model's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.every_method import each_method
from torch import Tensor, nn
from zoo.small import GRID, WIDTH, images, vision

from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaLRP
from captum_ssm.errors import InputError


def test_a_patch_may_change_in_one_channel_alone() -> None:
    """Most channels of the patch embedding do not read the image."""
    model, pictures = vision("middle"), images(2)
    reads = torch.zeros(WIDTH)
    reads[3] = 1
    with torch.no_grad():
        model.patch.weight *= reads[:, None, None, None]
    row = ImplicitAttentionRollout(model, layers=["blocks.0.mixer"])
    found = row.attribute(pictures, query="last", per_token=True)
    assert found.shape == (2, *GRID)


class Sequenced(nn.Conv2d):
    """A convolution that lays its patches out in a row."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image).flatten(2).mT


class OfARow(nn.Module):
    """A model whose patches come in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vision(None)
        self.inner.patch = Sequenced(3, WIDTH, kernel_size=(4, 3), stride=(4, 3))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.inner.patch(pictures) + self.inner.position_embed
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(self.inner.norm(x).mean(1))


@pytest.mark.parametrize("method", [LatimFlow, MambaLRP])
def test_patches_in_a_row_are_no_grid(method: Any) -> None:
    with pytest.raises(InputError, match="no 2-D convolution before its first mixer"):
        method(OfARow().eval()).attribute(images(2), target=1, per_token=True)


class Stemmed(nn.Module):
    """A model with a convolution in front of that of its patches."""

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
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("size", [(12, 12), (14, 13)])
def test_pixels_are_summed_over_the_cells_they_lie_in(size: tuple[int, int]) -> None:
    """Also where patches do not divide the image."""
    model, pictures = vision(None).double(), torch.randn(2, 3, *size).double()
    pixels = LatimFlow(model).attribute(pictures, target=1)
    wanted = torch.zeros(2, *GRID, dtype=torch.float64)
    for y in range(size[0]):
        for x in range(size[1]):
            wanted[:, y * GRID[0] // size[0], x * GRID[1] // size[1]] += pixels[:, :, y, x].sum(1)
    found = LatimFlow(model).attribute(pictures, target=1, per_token=True)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
