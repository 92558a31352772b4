"""Windows of a map, and relevance carried past a convolution."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn

from captum_ssm.mixers.parts.token_map import Reduction, TokenMap, square_windows


def tokens_read(conv: nn.Conv2d, size: tuple[int, int]) -> Tensor:
    """1 where an output (row) reads a token (column), (L', L), found by moving one token."""
    assert conv.weight.dtype == torch.float64
    with torch.no_grad():
        conv.weight.abs_().add_(0.1)
        still = conv(torch.zeros(1, 1, *size).double())
        moved = torch.eye(size[0] * size[1]).double().view(-1, 1, *size)
        return ((conv(moved) - still)[:, 0].flatten(1).T != 0).double()


@pytest.mark.parametrize("options", [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": (1, 4), "stride": (1, 3), "padding": (0, 2)},
    {"kernel_size": 3, "dilation": 2, "stride": 2, "padding": 2},
])  # fmt: skip
def test_tokens_that_are_read_share_equally(options: dict[str, object]) -> None:
    for size in ((6, 6), (5, 8), (7, 4)):
        conv = nn.Conv2d(1, 1, **options).double()  # type: ignore[arg-type]
        reduction = Reduction(conv, size)
        read = tokens_read(conv, size)
        height, width = reduction.reduced
        assert height * width == len(read)
        row = torch.randn(3, len(read), dtype=torch.float64)
        wanted = row @ (read / read.sum(-1, keepdim=True))
        found = reduction.spread(row)
        assert relative_error(found, wanted) <= 1e-12
        torch.testing.assert_close(found.sum(-1), row.sum(-1))
        assert relative_error(reduction.spread(row.float()), wanted) <= 1e-5


@pytest.mark.parametrize("size", [(6, 6), (5, 7), (1, 4), (3, 1), (9, 2)])
@pytest.mark.parametrize("side", [1, 2, 3, 8])
def test_square_windows(size: tuple[int, int], side: int) -> None:
    windows = square_windows(size, side, torch.device("cpu"))
    across = -(-size[1] // side)
    assert windows.places.shape == (-(-size[0] // side) * across, side * side)
    assert windows.tokens == size[0] * size[1]
    for w, held in enumerate(windows.places.tolist()):
        for place, (i, j) in enumerate(itertools.product(range(side), repeat=2)):
            row, column = w // across * side + i, w % across * side + j
            inside = row < size[0] and column < size[1]
            assert held[place] == (row * size[1] + column if inside else -1)


def test_outputs_in_order() -> None:
    windows = square_windows((5, 4), 3, torch.device("cpu"))
    tokens = torch.randn(2, 20, 6)
    padded = torch.cat([tokens, torch.full((2, 1, 6), torch.nan)], 1)  # place -1 is padding
    cut = padded[:, windows.places].flatten(0, 1)  # (B W, T, E)
    assert torch.equal(TokenMap((5, 4), windows).in_order(cut), tokens)
