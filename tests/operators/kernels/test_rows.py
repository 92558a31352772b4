"""Positions counted from either end, rows a few at a time, and where strips lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from captum_ssm.errors import QueryError
from captum_ssm.operators.kernels import rows
from captum_ssm.operators.kernels.rows import (
    Strip,
    clipped,
    in_stacks,
    per_example,
    sum_strips,
    unit_vectors,
)

CPU = torch.device("cpu")


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def test_both_ends_count() -> None:
    found = per_example([-4, -1, 0, 3], 2, 4, CPU)
    assert found.tolist() == [[0, 3, 0, 3]] * 2
    each = per_example(torch.tensor([[-4, 3], [-2, 0]]), 2, 4, CPU)
    assert each.tolist() == [[0, 3], [2, 0]]


@pytest.mark.parametrize("asked", [[4], [0, -5], [[0, 1], [1, 4]], [[0], [-5]], []])
def test_positions_outside_are_named(asked: list[Any]) -> None:
    given = torch.tensor(asked) if asked and isinstance(asked[0], list) else asked
    with pytest.raises(QueryError, match=r"positions must lie in \[-4, 4\)") as caught:
        per_example(given, 2, 4, CPU)
    assert str(given) in str(caught.value)


def test_unit_vectors_per_example() -> None:
    like = torch.ones((), dtype=torch.float16)
    common = unit_vectors(range(1, 3), 4, like)
    assert (common.shape, common.dtype) == ((2, 1, 4, 1, 1), torch.float16)
    assert common.flatten(1).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    each = unit_vectors(torch.tensor([[3, 0]]), 4, like)
    assert each.flatten(2).tolist() == [[[0, 0, 0, 1], [1, 0, 0, 0]]]


@pytest.mark.parametrize("elements", [0, 1, 3, 10, 11, 1000])
def test_stacks_hold_what_they_may(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_STACK_ELEMENTS", 10)
    parts = list(in_stacks(range(3, 20), elements, torch.device("cpu")))
    assert [row for part in parts for row in part] == list(range(3, 20))
    most = max(1, 10 // max(1, elements))
    assert max(map(len, parts)) == min(most, 17)
    assert len(parts) == -(-17 // most)


# --- the ranges of rows and columns --------------------------------------------------------

RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: range(*sorted(ends)))


def placed(strip: Strip, tokens: int) -> Tensor:
    """The matrix that the strip is part of, zero elsewhere."""
    out = torch.zeros(len(strip.entries), tokens, tokens, dtype=torch.float64)
    rows = slice(strip.rows.start, strip.rows.stop)
    out[:, rows, strip.columns.start : strip.columns.stop] = strip.entries
    return out


@given(RANGES, st.integers(-15, 15))
def test_clipped_ranges(positions: range, by: int) -> None:
    wanted = [p + by for p in positions if 0 <= p + by < 12]
    assert list(clipped(positions, by, 12)) == wanted


@settings(max_examples=50)
@given(RANGES, RANGES, st.integers(-14, 14), st.integers(-14, 14))
def test_moved_strips(rows: range, columns: range, down: int, right: int) -> None:
    strip = Strip(randn(2, len(rows), len(columns)), rows, columns)
    before, after = placed(strip, 12), placed(strip.moved(down, right, 12), 12)
    wanted = torch.zeros_like(before)
    for i in range(12):
        for j in range(12):
            if 0 <= i - down < 12 and 0 <= j - right < 12:
                wanted[:, i, j] = before[:, i - down, j - right]
    assert torch.equal(after, wanted)


@settings(max_examples=30)
@given(st.lists(st.tuples(RANGES, RANGES), min_size=1, max_size=4))
def test_totals(places: list[tuple[range, range]]) -> None:
    strips = [Strip(randn(2, len(r), len(c)), r, c) for r, c in places]
    wanted = torch.stack([placed(strip, 12) for strip in strips]).sum(0)
    found = sum_strips(iter(strips), range(12))
    assert found.rows == range(12)
    torch.testing.assert_close(placed(found, 12), wanted)
