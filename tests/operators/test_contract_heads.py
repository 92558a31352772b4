"""Contractions head by head, held against explicit matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sessions import full
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import (
    Chain,
    Diagonal,
    ElementwiseRecurrence,
    Permute,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
    generic,
)

EXACT = 1e-12


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def by_head(matrices: Tensor, left: Tensor, right: Tensor, shape: Shape) -> Tensor:
    """Sums over the channels of each head, from matrices (B, C, L, L)."""
    matrices = matrices.unflatten(1, shape[2:])
    left, right = left.expand(shape), right.expand(shape)
    return torch.einsum("bihp,bhpij,bjhp->bhij", left, matrices, right)


@pytest.mark.parametrize("tokens", [1, 2, 11, *full(70)])
def test_sum_over_the_channels_of_a_head(build: Callable[[int], Any], tokens: int) -> None:
    case = build(tokens)
    left, right = randn(*case.shape), randn(*case.shape)
    wanted = by_head(case.matrices, left, right, case.shape)
    assert relative_error(case.operator.contract_heads(left, right), wanted) <= EXACT
    found = generic.contract_heads(case.operator, left, right)
    assert relative_error(found, wanted) <= EXACT
    assert relative_error(wanted.sum(1), case.operator.contract(left, right)) <= EXACT


def test_factors_broadcast(build: Callable[[int], Any]) -> None:
    case = build(7)
    batch, tokens, heads, per_head = case.shape
    sizes = [(1, 1, 1, 1), (batch, tokens, heads, 1), (1, 1, 1, per_head)]
    for left, right in ((randn(*a), randn(*b)) for a in sizes for b in sizes):
        kept = left.clone(), right.clone()
        wanted = by_head(case.matrices, left, right, case.shape)
        assert relative_error(case.operator.contract_heads(left, right), wanted) <= EXACT
        assert torch.equal(left, kept[0]) and torch.equal(right, kept[1])


@pytest.mark.parametrize("tokens", [1, 8, 64, 67])
def test_elementwise_recurrences_with_resets(tokens: int) -> None:
    decay = torch.rand(2, tokens, 3, dtype=torch.float64)
    decay[0, tokens // 2] = 0
    operator = ElementwiseRecurrence(decay)
    left, right = randn(*operator.shape), randn(*operator.shape)
    wanted = generic.contract_heads(operator, left, right)
    assert relative_error(operator.contract_heads(left, right), wanted) <= EXACT


@pytest.mark.parametrize("lags", [(0, 1, 2, 3), (-1, 0, 1), (3,), (-2, 20), (0, 7)])
@pytest.mark.parametrize("tokens", [1, 6, 65])
def test_a_scan_between_convolutions(tokens: int, lags: tuple[int, ...]) -> None:
    """Near lags stay inside the recurrence, far ones do not."""
    shape = Shape(2, tokens, 4, 1)
    dt, a = torch.rand(2, tokens, 4).double(), -torch.rand(4, 3).double()
    b, c = randn(2, tokens, 2, 3), randn(2, tokens, 2, 3)
    scan = SelectiveScan(dt, a, b, c)
    gate, skip = randn(*shape), randn(1, 1, 4, 1)
    before, after = randn(4, 1, len(lags)), randn(4, 1, 2)
    flip = Permute(torch.arange(tokens).flip(0), shape)
    operator = Chain(
        flip,
        Diagonal(gate, shape),
        ShortConv(after, shape, lags=(0, -1)),
        Sum(scan, Diagonal(skip, shape)),
        ShortConv(before, shape, lags=lags),
        flip,
    )
    left, right = randn(*shape), randn(*shape)
    wanted = generic.contract_heads(operator, left, right)
    assert relative_error(operator.contract_heads(left, right), wanted) <= EXACT
