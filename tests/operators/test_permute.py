"""Reorderings of the tokens by themselves, and beside operators of another precision."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import Chain, Diagonal, Operator, Permute, Shape, Sum

EXACT = 1e-12
SHAPE = Shape(batch=2, tokens=7, heads=3, per_head=2)


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def reordering() -> tuple[Permute, Tensor]:
    """A reordering and its matrix (L, L)."""
    order = torch.randperm(SHAPE.tokens)
    return Permute(order, SHAPE), torch.eye(SHAPE.tokens, dtype=torch.float64)[order]


def cases() -> list[tuple[Operator, Tensor]]:
    """Reorderings alone, which have no coefficients, with their matrices."""
    (first, a), (second, b) = reordering(), reordering()
    return [
        (first, a),
        (Chain(first), a),
        (Chain(first, second), a @ b),
        (Sum(first, second), a + b),
    ]


@pytest.mark.parametrize("case", range(4))
def test_without_coefficients(case: int) -> None:
    operator, matrix = cases()[case]
    assert operator.device == torch.device("cpu")
    assert torch.equal(operator.rows([3, -1])[1].double(), matrix[[3, -1]])
    assert relative_error(operator.dense(), matrix.expand(2, 7, 7)) <= 1e-6
    assert relative_error(operator.dense(None), matrix.expand(2, 6, 7, 7)) <= 1e-6
    assert relative_error(operator.dense("heads"), matrix.expand(2, 3, 7, 7)) <= 1e-6


@pytest.mark.parametrize("case", range(4))
def test_factors_keep_their_precision(case: int) -> None:
    operator, matrix = cases()[case]
    left, right = randn(*SHAPE), randn(*SHAPE)
    by_head = torch.einsum("bihp,ij,bjhp->bhij", left, matrix, right)
    found = operator.contract(left, right)
    assert found.dtype == torch.float64
    assert relative_error(found, by_head.sum(1)) <= EXACT
    assert relative_error(operator.contract_heads(left, right), by_head) <= EXACT


@pytest.mark.parametrize("permute_first", [False, True])
def test_sums_keep_their_precision(permute_first: bool) -> None:
    permute, matrix = reordering()
    weight = randn(*SHAPE)
    diagonal = Diagonal(weight, SHAPE)
    terms = (permute, diagonal) if permute_first else (diagonal, permute)
    left, right = randn(*SHAPE), randn(*SHAPE)
    wanted = torch.einsum("bihp,ij,bjhp->bhij", left, matrix, right)
    wanted += torch.diag_embed((left * weight * right).sum(-1).transpose(1, 2))
    operator = Sum(*terms)
    assert relative_error(operator.contract(left, right), wanted.sum(1)) <= EXACT
    assert relative_error(operator.contract_heads(left, right), wanted) <= EXACT
