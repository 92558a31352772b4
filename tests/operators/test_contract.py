"""Every operator keeps the operator contract, held against explicit matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sessions import full
from oracles import relative_error, times
from torch import Tensor

from captum_ssm.operators import generic
from captum_ssm.operators.kernels import rows as query_positions

# "max|a - b| / max|b|" of results that took different roads in float64
EXACT = 1e-12
LENGTHS = [
    *(1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 65),
    *full(64, 100),
]


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def contracted(matrices: Tensor, left: Tensor, right: Tensor, shape: Any) -> Tensor:
    left, right = left.expand(shape).flatten(2), right.expand(shape).flatten(2)
    return torch.einsum("bic,bcij,bjc->bij", left, matrices, right)


@pytest.mark.parametrize("tokens", [1, 2, 11, 37])
def test_apply_is_the_matrix_product(build: Callable[[int], Any], tokens: int) -> None:
    case = build(tokens)
    v = randn(*case.shape)
    assert relative_error(case.operator.apply(v), times(case.matrices, v)) <= EXACT


@pytest.mark.parametrize("tokens", [1, 2, 11, 37])
def test_transpose_is_the_adjoint(build: Callable[[int], Any], tokens: int) -> None:
    case = build(tokens)
    u, v = randn(*case.shape), randn(*case.shape)
    found = case.operator.transpose(u)
    assert relative_error(found, times(case.matrices.mT, u)) <= EXACT
    there, back = (u * case.operator.apply(v)).sum(), (found * v).sum()
    torch.testing.assert_close(there, back, rtol=1e-10, atol=1e-10)


def test_generic_transpose_agrees(build: Callable[[int], Any]) -> None:
    case = build(9)
    u = randn(*case.shape)
    found = generic.transpose(case.operator, u)
    assert not found.requires_grad
    assert relative_error(found, times(case.matrices.mT, u)) <= EXACT


def test_generic_transpose_works_where_autograd_is_off(build: Callable[[int], Any]) -> None:
    case = build(5)
    u = randn(*case.shape)
    wanted = times(case.matrices.mT, u)
    with torch.no_grad():
        assert relative_error(generic.transpose(case.operator, u), wanted) <= EXACT
    with torch.inference_mode():
        assert relative_error(generic.transpose(case.operator, u.clone()), wanted) <= EXACT


def test_stacks_of_vectors_are_mapped_at_once(build: Callable[[int], Any]) -> None:
    case = build(6)
    v = randn(3, 2, *case.shape)
    assert relative_error(case.operator.apply(v), times(case.matrices, v)) <= EXACT
    assert relative_error(case.operator.transpose(v), times(case.matrices.mT, v)) <= EXACT


def test_strided_and_expanded_values(build: Callable[[int], Any]) -> None:
    case = build(6)
    batch, tokens, heads, per_head = case.shape
    strided = randn(per_head, heads, tokens, batch).permute(3, 2, 1, 0)
    expanded = randn(tokens, 1, 1).expand(case.shape)
    for v in (strided, expanded):
        kept = v.clone()
        assert relative_error(case.operator.apply(v), times(case.matrices, v)) <= EXACT
        assert relative_error(case.operator.transpose(v), times(case.matrices.mT, v)) <= EXACT
        assert torch.equal(v, kept), "the values were overwritten"


def test_offset_and_affine(build: Callable[[int], Any]) -> None:
    case = build(7)
    v = randn(*case.shape)
    offset = case.operator.offset()
    if offset is None:
        assert not case.offset.any()
    else:
        assert case.offset.any()
        assert relative_error(offset, case.offset) <= EXACT
    wanted = times(case.matrices, v) + case.offset
    assert relative_error(case.operator.affine(v), wanted) <= EXACT


# --- rows ----------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda alpha: alpha.mean(1),
    "max": lambda alpha: alpha.amax(1),
    "min": lambda alpha: alpha.amin(1),
    "product": lambda alpha: alpha.prod(1),
}


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_at_common_positions(build: Callable[[int], Any], reduce: str) -> None:
    case = build(8)
    wanted = REDUCTIONS[reduce](case.matrices)[:, [5, 0, 7, 5]]
    assert relative_error(case.operator.rows([5, 0, 7, 5], reduce), wanted) <= EXACT


def test_rows_keep_channels_or_heads(build: Callable[[int], Any]) -> None:
    case = build(8)
    batch, _, heads, per_head = case.shape
    wanted = case.matrices[:, :, [6, 1]]
    assert relative_error(case.operator.rows([6, 1], None), wanted) <= EXACT
    by_head = wanted.view(batch, heads, per_head, 2, 8).mean(2)
    assert relative_error(case.operator.rows([6, 1], "heads"), by_head) <= EXACT


def test_rows_with_a_function(build: Callable[[int], Any]) -> None:
    case = build(8)
    wanted = case.matrices.abs().amax(1)[:, [3]]
    found = case.operator.rows([3], lambda channels: channels.abs().amax(-1))
    assert relative_error(found, wanted) <= EXACT


@pytest.mark.parametrize("reduce", ["mean", None])
def test_rows_at_positions_per_example(build: Callable[[int], Any], reduce: str | None) -> None:
    case = build(8)
    positions = torch.tensor([[7, 2, 3], [0, 6, 6]])
    wanted = torch.stack([case.matrices[b][:, positions[b]] for b in range(2)])
    if reduce == "mean":
        wanted = wanted.mean(1)
    assert relative_error(case.operator.rows(positions, reduce), wanted) <= EXACT


@pytest.mark.parametrize("common", [False, True], ids=["each its own", "all alike"])
def test_rows_with_factors(build: Callable[[int], Any], common: bool) -> None:
    """Factors that differ by row, example and channel, or are one number for all of them."""
    case = build(8)
    batch, tokens, heads, per_head = case.shape
    positions = torch.tensor([[7, 2, 3], [0, 6, 6]])
    size = (1, 1, 1, 1, 1) if common else (3, batch, 1, heads, per_head)
    weight = torch.randn(size, dtype=torch.float64)
    found = case.operator.unit_rows(positions.T, weight).flatten(-2)  # (Q, B, L, C)
    rows = torch.stack([case.matrices[b][:, positions[b]] for b in range(batch)])  # (B, C, Q, L)
    assert found.shape == (3, batch, tokens, heads * per_head)
    wanted = rows * weight.flatten(2).permute(1, 2, 0)[..., None]
    assert relative_error(found.permute(1, 3, 0, 2), wanted) <= EXACT


def test_positions_of_every_kind(build: Callable[[int], Any]) -> None:
    case = build(6)
    wanted = case.matrices.mean(1)[:, 2:5]
    for positions in (range(2, 5), [2, 3, 4], (2, 3, 4), torch.tensor([2, 3, 4])):
        assert relative_error(case.operator.rows(positions), wanted) <= EXACT


def test_rows_in_many_pieces(build: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(7)
    positions = torch.tensor([[6, 2, 3, 3, 0], [0, 6, 1, 4, 2]])
    wanted = torch.stack([case.matrices[b][:, positions[b]] for b in range(2)])
    for vectors_at_once in (1, 2):
        size = vectors_at_once * torch.Size(case.shape).numel()
        monkeypatch.setattr(query_positions, "_STACK_ELEMENTS", size)
        assert relative_error(case.operator.rows(positions, None), wanted) <= EXACT


# --- whole matrices ------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_dense_reduced(build: Callable[[int], Any], reduce: str) -> None:
    case = build(9)
    assert relative_error(case.operator.dense(reduce), REDUCTIONS[reduce](case.matrices)) <= EXACT


def test_dense_of_every_channel_and_head(build: Callable[[int], Any]) -> None:
    case = build(9)
    assert relative_error(case.operator.dense(None), case.matrices) <= EXACT
    by_head = case.matrices.unflatten(1, case.shape[2:]).mean(2)
    assert relative_error(case.operator.dense("heads"), by_head) <= EXACT


@pytest.mark.parametrize("reduce", ["mean", "max", None])
def test_dense_of_some_heads(build: Callable[[int], Any], reduce: str | None) -> None:
    case = build(5)
    chosen = case.matrices.unflatten(1, case.shape[2:])[:, [1, 0]].flatten(1, 2)
    wanted = chosen if reduce is None else REDUCTIONS[reduce](chosen)
    assert relative_error(case.operator.dense(reduce, heads=[1, 0]), wanted) <= EXACT


def test_select(build: Callable[[int], Any]) -> None:
    case = build(6)
    heads = [case.shape.heads - 1, 0]
    part = case.operator.select(heads)
    assert part.shape == case.shape._replace(heads=2)
    v = randn(*part.shape)
    matrices = case.matrices.unflatten(1, case.shape[2:])[:, heads].flatten(1, 2)
    assert relative_error(part.apply(v), times(matrices, v)) <= EXACT
    assert relative_error(part.transpose(v), times(matrices.mT, v)) <= EXACT
    wanted = times(matrices, v) + case.offset[:, :, heads]
    assert relative_error(part.affine(v), wanted) <= EXACT
    assert relative_error(part.dense(), matrices.mean(1)) <= EXACT
    again = part.select([1])
    assert relative_error(again.dense(), matrices[:, matrices.shape[1] // 2 :].mean(1)) <= EXACT


@pytest.mark.parametrize("tokens", LENGTHS)
def test_contract_agrees_with_the_generic_one(build: Callable[[int], Any], tokens: int) -> None:
    case = build(tokens)
    left, right = randn(*case.shape), randn(*case.shape)
    found = case.operator.contract(left, right)
    assert relative_error(found, generic.contract(case.operator, left, right)) <= EXACT


@pytest.mark.parametrize("tokens", [1, 2, 9, 17, 33])
def test_contract_is_the_weighted_sum(build: Callable[[int], Any], tokens: int) -> None:
    case = build(tokens)
    left, right = randn(*case.shape), randn(*case.shape)
    wanted = contracted(case.matrices, left, right, case.shape)
    assert relative_error(case.operator.contract(left, right), wanted) <= EXACT
    assert relative_error(generic.contract(case.operator, left, right), wanted) <= EXACT


def test_contract_broadcasts(build: Callable[[int], Any]) -> None:
    case = build(10)
    batch, tokens, heads, per_head = case.shape
    sizes = [(1, 1, 1, 1), (batch, 1, heads, 1), (1, tokens, 1, per_head)]
    for left, right in [(randn(*s), randn(*r)) for s in sizes for r in sizes]:
        wanted = contracted(case.matrices, left, right, case.shape)
        kept = left.clone(), right.clone()
        assert relative_error(case.operator.contract(left, right), wanted) <= EXACT
        assert relative_error(generic.contract(case.operator, left, right), wanted) <= EXACT
        assert torch.equal(left, kept[0]) and torch.equal(right, kept[1])


def test_contract_twice_gives_the_same(build: Callable[[int], Any]) -> None:
    case = build(12)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    coefficients = {name: t.clone() for name, t in case.operator.tensors().items()}
    first = case.operator.contract(one, one)
    assert torch.equal(case.operator.contract(one, one), first)
    for name, tensor in case.operator.tensors().items():
        assert torch.equal(tensor, coefficients[name]), f"{name} was overwritten"


@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_products_with_the_mean_matrix(build: Callable[[int], Any], tokens: int) -> None:
    case = build(tokens)
    mean = case.matrices.mean(1)
    x = randn(2, tokens)
    assert relative_error(case.operator.mean_matvec(x), torch.einsum("bij,bj->bi", mean, x)) <= (
        EXACT
    )
    assert relative_error(case.operator.mean_rmatvec(x), torch.einsum("bi,bij->bj", x, mean)) <= (
        EXACT
    )


# --- autograd ------------------------------------------------------------------------------


def test_apply_and_transpose_are_differentiable(build: Callable[[int], Any]) -> None:
    case = build(3)
    if case.shape.heads > 10:
        case.operator = case.operator.select([0, 129])
    v = randn(*case.operator.shape).requires_grad_()
    stack = randn(2, *case.operator.shape).requires_grad_()
    for function in (case.operator.apply, case.operator.transpose, case.operator.affine):
        assert torch.autograd.gradcheck(function, v, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, v, fast_mode=True)
    assert torch.autograd.gradcheck(case.operator.apply, stack, fast_mode=True)


def test_gradient_of_apply_is_the_adjoint(build: Callable[[int], Any]) -> None:
    case = build(14)
    v, u = randn(*case.shape).requires_grad_(), randn(*case.shape)
    (gradient,) = torch.autograd.grad(case.operator.apply(v), v, u)
    assert relative_error(gradient, times(case.matrices.mT, u)) <= EXACT
    (gradient,) = torch.autograd.grad(case.operator.transpose(v), v, u)
    assert relative_error(gradient, times(case.matrices, u)) <= EXACT


def test_device_dtype_and_tensors(build: Callable[[int], Any]) -> None:
    operator = build(4).operator
    assert operator.device == torch.device("cpu")
    assert operator.dtype == torch.float64
    tensors = operator.tensors()
    assert len(tensors) == sum(len(leaf.tensors()) for leaf in operator.leaves())
    addresses = {t.data_ptr() for t in tensors.values()}
    assert addresses == {
        t.data_ptr() for leaf in operator.leaves() for t in leaf.tensors().values()
    }
