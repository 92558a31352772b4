"""Strips of every operator are rows of its matrices, held against explicit ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import chain, generic
from captum_ssm.operators.kernels.rows import Strip, clipped, sum_strips
from captum_ssm.operators.recurrences import scalar_decay

EXACT = 1e-12
Build = Callable[[int], Any]


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def contracted(case: Any, left: Tensor, right: Tensor) -> Tensor:
    left, right = left.expand(case.shape).flatten(2), right.expand(case.shape).flatten(2)
    return torch.einsum("bic,bcij,bjc->bij", left, case.matrices, right)


def placed(strip: Strip, tokens: int) -> Tensor:
    """The matrix that the strip is part of, zero elsewhere."""
    out = torch.zeros(len(strip.entries), tokens, tokens, dtype=torch.float64)
    rows = slice(strip.rows.start, strip.rows.stop)
    out[:, rows, strip.columns.start : strip.columns.stop] = strip.entries
    return out


def row_ranges(tokens: int, height: int) -> Iterator[range]:
    """All rows, so many at a time."""
    for start in range(0, tokens, height):
        yield range(start, min(start + height, tokens))


def check_rows(strip: Strip, rows: range, wanted: Tensor) -> None:
    """The strip holds the rows asked for of a whole matrix, and leaves out zeros alone."""
    assert strip.rows == rows
    assert strip.entries.shape == (2, len(rows), len(strip.columns))
    found = placed(strip, wanted.shape[-1])[:, rows.start : rows.stop]
    error = (found - wanted[:, rows.start : rows.stop]).abs().max()
    assert error <= EXACT * wanted.abs().max()
    assert torch.equal(strip.whole(wanted.shape[-1]), found)


@pytest.mark.parametrize("tokens", [1, 2, 9, 23])
def test_strips_are_rows(build: Build, tokens: int) -> None:
    case = build(tokens)
    left, right = randn(*case.shape), randn(*case.shape)
    wanted = contracted(case, left, right)
    for height in {1, 2, 5, 8, tokens}:
        for rows in row_ranges(tokens, height):
            check_rows(case.operator.strip(left, right, rows), rows, wanted)


def test_generic_strips_are_rows(build: Build) -> None:
    case = build(10)
    left, right = randn(*case.shape), randn(*case.shape)
    wanted = contracted(case, left, right)
    for rows in row_ranges(10, 4):
        check_rows(generic.strip(case.operator, left, right, rows), rows, wanted)


def test_factors_are_broadcast_and_kept(build: Build) -> None:
    case = build(11)
    batch, tokens, heads, per_head = case.shape
    sizes = [(1, 1, 1, 1), (batch, 1, heads, 1), (1, tokens, 1, per_head), case.shape]
    for left, right in [(randn(*s), randn(*r)) for s in sizes for r in sizes]:
        kept = left.clone(), right.clone()
        wanted = contracted(case, left, right)
        check_rows(case.operator.strip(left, right, range(3, 9)), range(3, 9), wanted)
        assert torch.equal(left, kept[0]) and torch.equal(right, kept[1])


def test_the_same_strip_twice(build: Build) -> None:
    case = build(9)
    coefficients = {name: t.clone() for name, t in case.operator.tensors().items()}
    first = case.operator.reduced_strip(range(4, 9))
    kept = first.entries.clone()
    again = case.operator.reduced_strip(range(4, 9))
    again.entries.zero_()  # a strip belongs to whoever asked for it
    assert torch.equal(first.entries, kept)
    assert torch.equal(case.operator.reduced_strip(range(4, 9)).entries, kept)
    for name, tensor in case.operator.tensors().items():
        assert torch.equal(tensor, coefficients[name]), f"{name} was overwritten"


@pytest.mark.parametrize("reduce", ["mean", "max", "min", "product", torch.median])
def test_reduced_strips(build: Build, reduce: Any) -> None:
    case = build(9)
    chosen = (lambda x: reduce(x, -1).values) if callable(reduce) else reduce
    wanted = case.operator.dense(chosen)
    for rows in row_ranges(9, 4):
        found = case.operator.reduced_strip(rows, chosen).whole(9)
        expected = wanted[:, rows.start : rows.stop]
        assert float((found - expected).abs().max()) <= EXACT * float(wanted.abs().max())


@pytest.mark.parametrize("lags", [(0,), (0, 1, 2, 3), (-2, 1), (-1, 0, 1), (5,), (-4,), (0, 40)])
@pytest.mark.parametrize("tokens", [1, 3, 21])
def test_strips_of_products_with_a_band(build: Build, tokens: int, lags: tuple[int, ...]) -> None:
    case = build(tokens)
    left = randn(*case.shape)
    band = {lag: randn(*case.shape) for lag in lags}
    wanted = torch.zeros(2, tokens, tokens, dtype=torch.float64)
    for lag, factor in band.items():
        product = contracted(case, left, factor)
        for column in range(max(0, -lag), min(tokens, tokens - lag)):
            wanted[:, :, column] += product[:, :, column + lag]
    scale = sum(contracted(case, left, factor).abs().max() for factor in band.values())
    for rows in row_ranges(tokens, 6):
        strip = case.operator.strip_of_product(left, band, rows)
        assert strip.rows == rows
        found = placed(strip, tokens)[:, rows.start : rows.stop]
        error = (found - wanted[:, rows.start : rows.stop]).abs().max()
        assert error <= EXACT * scale


def test_blocks_of_channels_add_up(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(12)
    left, right = randn(*case.shape), randn(*case.shape)
    wanted = contracted(case, left, right)
    monkeypatch.setattr(chain, "_FACTOR_ELEMENTS", 2 * 2 * 12)  # two channels, or as many as rows
    for rows in (range(0, 12), range(7, 10), range(4, 6)):
        check_rows(case.operator.strip(left, right, rows), rows, wanted)
    assert relative_error(case.operator.contract(left, right), wanted) <= EXACT


def test_products_of_queries_and_keys_a_few_rows_at_a_time(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build(11)
    left, right = randn(*case.shape[:3], 1), randn(*case.shape[:3], 1)
    wanted = contracted(case, left, right)
    monkeypatch.setattr(scalar_decay, "_ROWS", 3)
    for rows in (range(0, 11), range(2, 10), range(6, 7)):
        check_rows(case.operator.strip(left, right, rows), rows, wanted)


def test_one_row_of_more_tokens_than_a_factor_holds(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build(12)
    left, right = randn(*case.shape), randn(*case.shape)
    monkeypatch.setattr(chain, "_FACTOR_ELEMENTS", 1)
    wanted = contracted(case, left, right)
    check_rows(case.operator.strip(left, right, range(5, 6)), range(5, 6), wanted)


# --- the ranges of rows and columns --------------------------------------------------------

RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: range(*sorted(ends)))


@given(RANGES, st.integers(-15, 15))
def test_clipped_ranges(positions: range, by: int) -> None:
    wanted = [p + by for p in positions if 0 <= p + by < 12]
    assert list(clipped(positions, by, 12)) == wanted


@settings(max_examples=200)
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


@settings(max_examples=100)
@given(st.lists(st.tuples(RANGES, RANGES), min_size=1, max_size=4))
def test_totals(places: list[tuple[range, range]]) -> None:
    strips = [Strip(randn(2, len(r), len(c)), r, c) for r, c in places]
    wanted = torch.stack([placed(strip, 12) for strip in strips]).sum(0)
    found = sum_strips(iter(strips), range(12))
    assert found.rows == range(12)
    torch.testing.assert_close(placed(found, 12), wanted)
