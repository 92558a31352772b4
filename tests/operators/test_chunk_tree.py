"""Matrices of heads from their chunks, held against those of loops over single tokens."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error, token_loops
from zoo.chunked_kinds import (
    EXACT,
    HEADS,
    VALUES,
    Make,
    applied,
    contracted,
    kinds,
    randn,
    scalar,
)

from captum_ssm.operators import Chain, Diagonal, Operator, Permute, ShortConv, Sum, generic
from captum_ssm.operators.kernels.chunks import CHUNK


@kinds
def test_factors_of_every_kind(make: Make, loop: token_loops.Loop) -> None:
    """Factors that channels share take another road than factors of their own."""
    operator = make(CHUNK + 11)
    batch, tokens, heads, per_head = operator.shape
    matrices = token_loops.matrices(loop, operator)
    sizes = [
        (1, 1, 1, 1),
        (batch, tokens, heads, 1),
        (1, 1, heads, per_head),
        (batch, tokens, heads, per_head),
    ]
    for left, right in ((randn(*a), randn(*b)) for a in sizes for b in sizes):
        wanted = contracted(matrices, left, right, operator)
        for x, y in ((left, right), (left.expand(operator.shape), right.expand(operator.shape))):
            assert relative_error(operator.contract(x, y), wanted.sum(1)) <= EXACT
            assert relative_error(operator.contract_heads(x, y), wanted) <= EXACT


@pytest.mark.parametrize("tokens", [1, 5, CHUNK, 3 * CHUNK + 2])
@kinds
def test_agrees_with_the_generic_version(make: Make, loop: token_loops.Loop, tokens: int) -> None:
    operator = make(tokens)
    left, right = randn(2, *operator.shape)
    wanted = generic.contract(operator, left, right)
    assert relative_error(operator.contract(left, right), wanted) <= EXACT
    wanted = generic.contract_heads(operator, left, right)
    assert relative_error(operator.contract_heads(left, right), wanted) <= EXACT
    x = randn(*operator.shape[:2])
    for found, wanted in (
        (operator.mean_matvec(x), Operator.mean_matvec(operator, x)),
        (operator.mean_rmatvec(x), Operator.mean_rmatvec(operator, x)),
    ):
        assert relative_error(found, wanted) <= EXACT


@kinds
def test_strips(make: Make, loop: token_loops.Loop) -> None:
    tokens = 2 * CHUNK + 30
    operator = make(tokens)
    left, right = randn(2, *operator.shape)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for factors in ((left, right), (one, one)):
        whole = generic.contract(operator, *factors)
        for start, stop in ((0, 1), (0, 70), (3, 4), (3, 100), (CHUNK, 2 * CHUNK), (100, tokens)):
            rows = range(start, stop)
            strip = operator.strip(*factors, rows)
            assert strip.rows == rows
            assert relative_error(strip.whole(tokens), whole[:, start:stop]) <= EXACT


@pytest.mark.parametrize("behind", [False, True], ids=["", "conv"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "gate"])
@pytest.mark.parametrize("reordered", [False, True], ids=["", "reordered"])
@kinds
def test_means_of_heads_between_what_tells_their_channels_apart(
    make: Make, loop: token_loops.Loop, ahead: bool, behind: bool, reordered: bool
) -> None:
    heads = make(40)
    shape = heads.shape
    parts: list[Operator] = [Diagonal(randn(*shape[:3], 1), shape)]
    parts += [Diagonal(randn(*shape), shape)] if ahead else []
    parts += [Permute(torch.randperm(40), shape)] if reordered else []
    parts += [Sum(heads, Diagonal(randn(1, 1, HEADS, 1), shape))]
    parts += [ShortConv(randn(HEADS, VALUES, 3), shape)] if behind else []
    operator = Chain(*parts)
    x = randn(*shape[:2])
    mean = operator.apply(x[..., None, None].expand(shape)).mean((-1, -2))
    adjoint = operator.transpose(x[..., None, None].expand(shape)).mean((-1, -2))
    assert relative_error(operator.mean_matvec(x), mean) <= EXACT
    assert relative_error(operator.mean_rmatvec(x), adjoint) <= EXACT


@pytest.mark.parametrize("lags", [(0, 1, 2), (1,), (-2, 3)])
@kinds
def test_strips_of_products_with_a_convolution(
    make: Make, loop: token_loops.Loop, lags: tuple[int, ...]
) -> None:
    operator = make(CHUNK + 20)
    shape = operator.shape
    gate, weight = randn(*shape), randn(HEADS, VALUES, len(lags))
    conv = ShortConv(weight, shape, lags=lags)
    for left in (gate, randn(*shape[:3], 1)):
        product = Chain(Diagonal(left, shape), operator, conv)
        wanted = generic.contract(product, gate, gate)
        for rows in (range(shape.tokens), range(50, 80)):
            strip = product.strip(gate, gate, rows).whole(shape.tokens)
            assert relative_error(strip, wanted[:, rows.start : rows.stop]) <= EXACT


@kinds
def test_selected_heads(make: Make, loop: token_loops.Loop) -> None:
    operator = make(CHUNK + 2)
    matrices = token_loops.matrices(loop, operator)
    for chosen in ([3, 0, 3], [3, 2], [1], [0, 1, 0]):
        part = operator.select(chosen)
        left, right = randn(2, *part.shape)
        wanted = contracted(matrices[:, chosen], left, right, part)
        assert relative_error(part.contract(left, right), wanted.sum(1)) <= EXACT
        assert relative_error(part.contract_heads(left, right), wanted) <= EXACT
        applied_to = applied(matrices[:, chosen], left)
        assert relative_error(part.apply(left), applied_to) <= EXACT


def test_one_group_serves_all_heads() -> None:
    operator = scalar(CHUNK + 1, groups=1)
    matrices = token_loops.matrices(token_loops.scalar_decay, operator)
    assert relative_error(operator.dense("heads"), matrices) <= EXACT
    assert relative_error(operator.dense("mean"), matrices.mean(1)) <= EXACT


@kinds
def test_nothing_is_overwritten(make: Make, loop: token_loops.Loop) -> None:
    operator = make(CHUNK + 5)
    kept = {name: t.clone() for name, t in operator.tensors().items()}
    left, right = randn(2, *operator.shape)
    factors = left.clone(), right.clone()
    operator.apply(left)
    operator.transpose(left)
    operator.contract(left, right)
    operator.contract_heads(left, right)
    assert torch.equal(left, factors[0]) and torch.equal(right, factors[1])
    for name, tensor in operator.tensors().items():
        assert torch.equal(tensor, kept[name]), f"{name} was overwritten"
