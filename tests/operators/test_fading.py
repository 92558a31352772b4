"""Recurrences after bands, for any number of examples and with lags that a band leaves out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import ElementwiseRecurrence, SelectiveScan, generic
from captum_ssm.operators.recurrences.base import TREE_LAGS, FadingRecurrence

EXACT = 1e-12
TOKENS, HEADS = 23, 4


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def scan(batch: int) -> FadingRecurrence:
    dt, a = torch.rand(batch, TOKENS, HEADS).double(), -torch.rand(HEADS, 3).double()
    return SelectiveScan(dt, a, randn(batch, TOKENS, 2, 3), randn(batch, TOKENS, 2, 3))


def elementwise(batch: int) -> FadingRecurrence:
    return ElementwiseRecurrence(torch.rand(batch, TOKENS, HEADS, dtype=torch.float64))


@pytest.mark.parametrize("lags", [(0, 2), (-3, 1), (4,), (0, TREE_LAGS - 1), (-1, TREE_LAGS - 1)])
@pytest.mark.parametrize("make", [scan, elementwise])
@pytest.mark.parametrize("batch", [1, 3])
def test_bands_with_gaps(
    make: Callable[[int], FadingRecurrence], batch: int, lags: tuple[int, ...]
) -> None:
    operator = make(batch)
    left, band = randn(*operator.shape), {lag: randn(*operator.shape) for lag in lags}
    kept = {lag: factor.clone() for lag, factor in band.items()}
    wanted = generic.heads_of_product(operator, left, band)
    assert relative_error(operator.heads_of_product(left, band), wanted) <= EXACT
    for rows in (range(TOKENS), range(5, 9)):
        found = operator.strip_of_product(left, band, rows).whole(TOKENS)
        assert relative_error(found, wanted.sum(1)[:, rows.start : rows.stop]) <= EXACT
    assert all(torch.equal(band[lag], factor) for lag, factor in kept.items())
