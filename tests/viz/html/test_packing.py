"""Maps in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from captum_ssm.errors import OptionError
from captum_ssm.viz.html.packing import PackedMap, entries_kept, pack


def parts(packed: PackedMap) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scales, shares, columns, overview and values, as packing.py says they lie."""
    size, kept, side = packed.size, packed.kept, packed.overview_side
    whole = kept == size
    counts = [4 * size, 4 * size, 0 if whole else 2 * size * kept, side * side, size * kept]
    assert len(packed.data) == sum(counts)
    ends = np.cumsum(counts)
    kinds = ["<f4", "<f4", "<u2", "i1", "i1"]
    raw = [packed.data[e - n : e] for e, n in zip(ends, counts, strict=True)]
    scales, shares, columns, overview, values = map(np.frombuffer, raw, kinds)
    every = np.tile(np.arange(size), (size, 1))
    columns = every if whole else columns.reshape(size, kept)
    return scales, shares, columns, overview.reshape(side, side), values.reshape(size, kept)


def random_map(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(size, 1).mul(4).exp()  # of very different sizes
    return (torch.randn(size, size) * rows).tril().to(dtype)


def test_small_maps_are_kept_whole() -> None:
    for size in (1, 23, 130):
        matrix = random_map(size, torch.bfloat16)
        if size == 23:
            matrix[7] = 0
        packed = pack(matrix, size)
        assert packed.kept == size
        scales, shares, _, _, values = parts(packed)
        exact = matrix.double().numpy()
        largest = np.abs(exact).max(1)
        np.testing.assert_allclose(scales, largest, rtol=1e-6)
        np.testing.assert_array_equal(shares, 1)
        error = np.abs(values / 127 * scales[:, None] - exact).max(1)
        assert (error <= largest / 254 * (1 + 1e-5)).all()
        assert packed.largest == pytest.approx(largest.max())


def test_large_maps_keep_the_strongest_of_each_row() -> None:
    size, kept = 211, 9
    matrix = random_map(size)
    packed = pack(matrix, kept)
    assert packed.kept == kept
    scales, shares, columns, _, values = parts(packed)
    exact = matrix.double().numpy()
    for row in range(size):
        order = sorted(range(size), key=lambda j: -abs(exact[row, j]))[:kept]
        held = [j for j in columns[row] if exact[row, j]]
        assert set(held) == {j for j in order if exact[row, j]}
        assert list(columns[row]) == sorted(columns[row])
        total = np.abs(exact[row]).sum()
        assert shares[row] == pytest.approx(np.abs(exact[row, order]).sum() / total, rel=1e-5)
        near = values[row] / 127 * scales[row] - exact[row, columns[row]]
        assert np.abs(near).max() <= scales[row] / 254 * (1 + 1e-5)


def test_the_overview_shows_the_strongest_entry_of_each_cell() -> None:
    for size in (128, 129, 300):
        matrix = random_map(size)
        packed = pack(matrix, 8)
        overview, cell = parts(packed)[3], packed.overview_cell
        assert packed.overview_side == -(-size // cell) <= 128
        exact = matrix.numpy()
        for row in range(packed.overview_side):
            for column in range(0, packed.overview_side, 7):
                inside = exact[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
                strongest = inside.flat[np.abs(inside).argmax()]
                assert overview[row, column] == np.round(strongest / packed.largest * 127)


def test_too_much_is_refused() -> None:
    with pytest.raises(OptionError, match=r"96 maps .* do not fit into 9.0 MB"):
        entries_kept([9000] * 96, 9_000_000)
    with pytest.raises(OptionError, match="at most 65536"):
        entries_kept([70_000], 10**12)
