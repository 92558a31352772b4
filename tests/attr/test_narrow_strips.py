"""Mixings of operators whose strips hold few columns, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import relative_error
from torch import Tensor

from captum_ssm.attr.engine.strips import Budget, in_strips, reduced
from captum_ssm.operators import Chain, Diagonal, LongConv, Operator, Shape, ShortConv
from captum_ssm.operators.kernels.rows import Strip

TOKENS = 13
SHAPE = Shape(batch=2, tokens=TOKENS, heads=3, per_head=2)


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


NARROW: dict[str, Callable[[], Operator]] = {
    "kernel": lambda: LongConv(randn(3, 2, 4), SHAPE),
    "gate": lambda: Diagonal(randn(*SHAPE), SHAPE),
    "taps": lambda: ShortConv(randn(3, 2, 3), SHAPE, lags=(0, 2, -1)),
    "gated kernel": lambda: Chain(Diagonal(randn(*SHAPE), SHAPE), LongConv(randn(3, 2, 2), SHAPE)),
}


def absolute(strip: Strip) -> Tensor:
    return strip.entries.abs_()


@pytest.mark.parametrize("rows", [1, 2, 5, TOKENS])
@pytest.mark.parametrize("kind", NARROW)
def test_entries_change_where_they_stand(kind: str, rows: int) -> None:
    operator = NARROW[kind]()
    budget = Budget(rows * 4 * 2 * TOKENS * 8)
    assert budget.height(operator, "mean") == rows
    mixing = in_strips(operator, "mean", budget, absolute)
    matrix, x = operator.dense().abs(), randn(2, TOKENS)
    forward = torch.einsum("bij,bj->bi", matrix, x)
    assert relative_error(mixing.matvec(x), forward) <= 1e-12
    late = x.clone()
    late[:, :6] = 0  # rows to which nothing is given are left out
    for row in (x, late, torch.zeros_like(x)):
        backward = torch.einsum("bi,bij->bj", row, matrix)
        assert relative_error(mixing.rmatvec(row), backward) <= 1e-12
        share = row / (1 + matrix.sum(-1))
        wanted = share + torch.einsum("bi,bij->bj", share, matrix)
        assert relative_error(mixing.carried(row, True), wanted) <= 1e-12
        assert relative_error(mixing.carried(row, False), row + backward) <= 1e-12


@pytest.mark.parametrize("reduce", ["mean", "max", "product"])
@pytest.mark.parametrize("kind", NARROW)
def test_reduced_matrices(kind: str, reduce: str) -> None:
    operator = NARROW[kind]()
    mixing, matrix = reduced(operator, reduce, Budget(10**5)), operator.dense(reduce)
    row = randn(2, TOKENS)
    wanted = torch.einsum("bi,bij->bj", row, matrix)
    assert relative_error(mixing.rmatvec(row), wanted) <= 1e-12
    sums = row / (1 + matrix.sum(-1))
    wanted = sums + torch.einsum("bi,bij->bj", sums, matrix)
    assert relative_error(mixing.carried(row, True), wanted) <= 1e-9
