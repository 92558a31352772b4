"""How patches are found among a model's tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo.small import GRID, WIDTH, images, vision

from captum_ssm import ImplicitAttentionRollout
from captum_ssm.attr.call.layout import PatchGrid
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


def test_patches_in_a_row_are_no_grid() -> None:
    model = vision(None)
    patch = Sequenced(3, WIDTH, kernel_size=(4, 3), stride=(4, 3))
    model.patch = patch
    finder = PatchGrid(model)
    with finder.watch():
        patch(images(2))
    assert finder.grid is None
    with pytest.raises(InputError, match="no 2-D convolution before its first mixer"):
        finder.sums(images(2))


def test_the_last_convolution_before_the_first_block_counts() -> None:
    model = vision(None)
    other = nn.Conv2d(3, 2, kernel_size=1)
    model.add_module("stem", other)
    finder = PatchGrid(model)
    with finder.watch():
        other(images(1))
        assert finder.grid == (12, 12)
        model.patch(images(1))
        assert finder.grid == GRID
        model.blocks[0](torch.randn(1, 5, WIDTH))
        other(images(1))
    assert finder.grid == GRID
    other(images(1))
    assert finder.grid == GRID, "a hook outlived the with"


@pytest.mark.parametrize("size", [(6, 4), (7, 5), (2, 9)])
def test_pixels_are_summed_over_the_cells_they_lie_in(size: tuple[int, int]) -> None:
    finder = PatchGrid(vision(None))
    finder.grid = (2, 3) if size[0] > 2 else (2, 4)
    pixels = torch.randn(2, 3, *size, dtype=torch.float64)
    wanted = torch.zeros(2, *finder.grid, dtype=torch.float64)
    for y in range(size[0]):
        for x in range(size[1]):
            cell = (y * finder.grid[0] // size[0], x * finder.grid[1] // size[1])
            wanted[:, cell[0], cell[1]] += pixels[:, :, y, x].sum(1)
    torch.testing.assert_close(finder.sums(pixels), wanted, rtol=1e-12, atol=1e-12)
