"""Random operators and compositions of them do what their matrices say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fuzz.fuzzing import fuzz
from fuzz.operator_nodes import Node
from fuzz.operator_trees import Case, cases
from fuzz.small_blocks import blocks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from captum_ssm.operators import Operator, generic
from captum_ssm.operators.kernels.rows import Strip

#: Of the largest number that may have cancelled.
LIMIT = {torch.float64: 1e-11, torch.float32: 1e-5}
#: What float32 cannot hold.
LARGEST = 1e36

REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    "mean": lambda alpha: alpha.mean(1),
    "max": lambda alpha: alpha.amax(1),
    "min": lambda alpha: alpha.amin(1),
    "product": lambda alpha: alpha.prod(1),
    None: lambda alpha: alpha,
}
SEEDS = st.integers(0, 2**31 - 1)


class Check:
    """Compares what an operator gives with its node."""

    def __init__(self, case: Case) -> None:
        self.node: Node = case.grow()
        self.dtype = case.dtype
        self.coefficients = bool(self.node.operator.tensors())
        operator: Operator = self.node.operator
        assert operator.shape == case.shape
        #: What matrices are read from.
        self.operator = operator.per_channel() if self.node.mixes_channels else operator

    def close(self, found: Tensor, wanted: Tensor, bound: Tensor) -> None:
        """``bound`` is what ``wanted`` would be if nothing cancelled."""
        assert found.shape == wanted.shape, (found.shape, wanted.shape)
        # reorderings alone have no dtype of their own
        assert found.dtype == self.dtype or not self.coefficients
        size = float(bound.abs().max()) if bound.numel() else 0.0
        if self.dtype == torch.float32 and size > LARGEST:
            return
        assert torch.isfinite(found).all()
        error = float((found - wanted).abs().max()) if wanted.numel() else 0.0
        assert error <= LIMIT[found.dtype] * size + 1e-30, (error, size)

    def contracted(self, left: Tensor, right: Tensor, by_head: bool = False) -> tuple[Tensor, ...]:
        """Sums over channels of left alpha right, and of their absolute values."""
        shape = self.node.operator.shape
        left, right = (x.double().expand(shape).flatten(2).mT for x in (left, right))
        out = []
        for alpha, x, y in (
            (self.node.matrices, left, right),
            (self.node.bound, left.abs(), right.abs()),
        ):
            weighted = x[..., None] * alpha * y[..., None, :]  # (B, C, L, L)
            heads = weighted.unflatten(1, shape[2:]).sum(2)
            out.append(heads if by_head else heads.sum(1))
        return tuple(out)


@fuzz(quick=40, long=1000)
@given(cases(), SEEDS, st.booleans())
def test_maps(case: Case, seed: int, small: bool) -> None:
    """Map, adjoint, constant and stacks of vectors."""
    check = Check(case)
    node, operator = check.node, check.node.operator
    torch.manual_seed(seed)
    u, v, stack = case.randn(*case.shape), case.randn(*case.shape), case.randn(2, *case.shape)
    with blocks(small):
        check.close(operator.apply(v), node.map(v), node.map(v.abs(), True))
        check.close(operator.affine(v), node.affine(v), node.affine(v.abs(), True))
        check.close(operator.transpose(u), node.adjoint(u), node.adjoint(u.abs(), True))
        check.close(operator.apply(stack), node.map(stack), node.map(stack.abs(), True))
        check.close(operator.transpose(stack), node.adjoint(stack), node.adjoint(stack.abs(), True))
        offset = operator.offset()
    wanted = node.constant()
    if offset is None:
        assert not wanted.any()
    else:
        check.close(offset, wanted, node.constant(True))


@fuzz(quick=20, long=600)
@given(cases(), SEEDS)
def test_identities(case: Case, seed: int) -> None:
    """Linearity, <A v, u> = <v, A' u>, and derivatives that are the adjoints."""
    check = Check(case)
    node, operator = check.node, check.node.operator
    torch.manual_seed(seed)
    u, v, w = case.randn(3, *case.shape)
    size = node.map(v.abs(), True) + node.map(w.abs(), True)
    both = operator.apply(0.5 * v - 2 * w)
    check.close(both, (0.5 * operator.apply(v) - 2 * operator.apply(w)).double(), 2 * size)
    there = (u.double() * operator.apply(v).double()).sum()
    back = (operator.transpose(u).double() * v.double()).sum()
    check.close(there.to(case.dtype), back, (u.abs().double() * size).sum())
    v.requires_grad_()
    mapped = operator.apply(v)
    gradient = torch.zeros_like(v)
    if mapped.requires_grad:  # else nothing of v is left
        (gradient,) = torch.autograd.grad(mapped, v, u)
    check.close(gradient, node.adjoint(u), node.adjoint(u.abs(), True))
    with torch.no_grad():
        by_autograd = generic.transpose(operator, u)
    check.close(by_autograd, node.adjoint(u), node.adjoint(u.abs(), True))


@fuzz(quick=20, long=600)
@given(cases(), st.sampled_from([*REDUCTIONS]), st.booleans())
def test_matrices(case: Case, reduce: Any, small: bool) -> None:
    check = Check(case)
    function = REDUCTIONS[reduce]
    wanted, bound = function(check.node.matrices), function(check.node.bound)
    if reduce == "min":  # its entries' errors are those of all
        bound = check.node.bound
    with blocks(small):
        check.close(check.operator.dense(reduce), wanted, bound)
    if not check.operator.mixes_tokens:
        off = ~torch.eye(case.shape.tokens, dtype=torch.bool)
        assert not check.node.matrices[..., off].any()


@fuzz(quick=20, long=600)
@given(cases(), st.sampled_from([*REDUCTIONS]), st.data())
def test_rows(case: Case, reduce: Any, data: st.DataObject) -> None:
    """Rows at common positions and at those of each example."""
    check = Check(case)
    batch, tokens, *_ = case.shape
    asked = data.draw(
        st.lists(
            st.lists(st.integers(-tokens, tokens - 1), min_size=batch, max_size=batch),
            min_size=1,
            max_size=4,
        )
    )
    positions = torch.tensor(asked).T  # (B, Q)
    common = positions[0].tolist()
    function = REDUCTIONS[reduce]
    wanted, size = function(check.node.matrices), function(check.node.bound)
    bound = check.node.bound if reduce == "min" else size
    check.close(check.operator.rows(common, reduce), wanted[..., common, :], bound)
    each = torch.stack([wanted[b][..., positions[b], :] for b in range(batch)])
    check.close(check.operator.rows(positions, reduce), each, bound)


@fuzz(quick=20, long=600)
@given(cases(), st.data(), st.booleans())
def test_some_heads(case: Case, data: st.DataObject, small: bool) -> None:
    """Heads in another order, and some of them only."""
    check = Check(case)
    order = data.draw(st.permutations(range(case.shape.heads)))
    chosen = order[: data.draw(st.integers(1, len(order)))]
    part = check.operator.select(chosen)
    assert part.shape == case.shape._replace(heads=len(chosen))
    check.coefficients = bool(part.tensors())
    matrices, bound = (
        x.unflatten(1, case.shape[2:])[:, chosen] for x in (check.node.matrices, check.node.bound)
    )
    with blocks(small):
        check.close(part.dense(None), matrices.flatten(1, 2), bound)
        check.close(part.dense("heads"), matrices.mean(2), bound)
        check.close(check.operator.dense("mean", heads=chosen), matrices.mean((1, 2)), bound)
    v = case.randn(*case.shape)
    own = check.node.operator.select(chosen).affine(v[:, :, chosen])
    check.close(own, check.node.affine(v)[:, :, chosen], check.node.affine(v.abs(), True))


@fuzz(quick=40, long=1000)
@given(cases(), SEEDS, st.lists(st.booleans(), min_size=8, max_size=8), st.booleans())
def test_contractions(case: Case, seed: int, varies: list[bool], small: bool) -> None:
    """Sums over all channels, and over those of each head, between factors that broadcast."""
    check = Check(case)
    torch.manual_seed(seed)
    left, right = factors(case, varies)
    kept = left.clone(), right.clone()
    with blocks(small):
        check.close(check.operator.contract(left, right), *check.contracted(left, right))
        by_head = check.contracted(left, right, by_head=True)
        check.close(check.operator.contract_heads(left, right), *by_head)
    assert torch.equal(left, kept[0]) and torch.equal(right, kept[1])


@fuzz(quick=40, long=1000)
@given(cases(), SEEDS, st.lists(st.booleans(), min_size=8, max_size=8), st.booleans(), st.data())
def test_strips(
    case: Case, seed: int, varies: list[bool], small: bool, data: st.DataObject
) -> None:
    """Neighbouring rows of a contraction, and of one of a product with a band."""
    check = Check(case)
    tokens = case.shape.tokens
    first = data.draw(st.integers(0, tokens - 1))
    rows = range(first, data.draw(st.integers(first + 1, tokens)))
    lags = data.draw(st.lists(st.integers(-20, 20), min_size=1, max_size=3, unique=True))
    torch.manual_seed(seed)
    left, right = factors(case, varies)
    band = {lag: case.randn(*case.shape) for lag in lags}
    with blocks(small):
        wanted, bound = check.contracted(left, right)
        check_strip(check, check.operator.strip(left, right, rows), rows, wanted, bound)
        strip = check.operator.strip_of_product(left, band, rows)
    wanted, bound = torch.zeros_like(wanted), torch.zeros_like(bound)
    for lag, factor in band.items():
        if abs(lag) >= tokens:  # all of it lies beyond the ends
            continue
        written = slice(max(0, -lag), tokens - max(0, lag))
        read = slice(max(0, lag), tokens + min(0, lag))
        for out, product in zip((wanted, bound), check.contracted(left, factor), strict=True):
            out[..., written] += product[..., read]
    check_strip(check, strip, rows, wanted, bound)


@fuzz(quick=20, long=600)
@given(cases(), st.sampled_from(["mean", "max", "min", "product"]), st.data())
def test_reduced_strips(case: Case, reduce: str, data: st.DataObject) -> None:
    check = Check(case)
    tokens = case.shape.tokens
    first = data.draw(st.integers(0, tokens - 1))
    rows = range(first, data.draw(st.integers(first + 1, tokens)))
    wanted, bound = (REDUCTIONS[reduce](x) for x in (check.node.matrices, check.node.bound))
    bound = check.node.bound.amax(1) if reduce == "min" else bound
    check_strip(check, check.operator.reduced_strip(rows, reduce), rows, wanted, bound)


@fuzz(quick=20, long=600)
@given(cases(), SEEDS, st.integers(1, 70), st.booleans())
def test_products_with_the_mean(case: Case, seed: int, longest: int, small: bool) -> None:
    """One vector over tokens, mapped at once or a few tokens at a time."""
    check = Check(case)
    torch.manual_seed(seed)
    x = case.randn(*case.shape[:2])
    mean, bound = check.node.matrices.mean(1), check.node.bound.mean(1)
    for method, spec in (("mean_matvec", "bij,bj->bi"), ("mean_rmatvec", "bij,bi->bj")):
        wanted = torch.einsum(spec, mean, x.double())
        size = torch.einsum(spec, bound, x.abs().double())
        with blocks(small):
            check.close(getattr(check.operator, method)(x), wanted, size)
    v, node = case.randn(*case.shape), check.node
    ahead = check.node.operator.stream(False, longest)
    if ahead is not None:
        found = torch.cat([ahead(v[:, p], p).clone() for p in parts(case, longest)], 1)
        check.close(found, node.map(v), node.map(v.abs(), True))
    back = check.node.operator.stream(True, longest)
    if back is not None:
        mapped = [back(v[:, p], p).clone() for p in [*parts(case, longest)][::-1]]
        found = torch.cat(mapped[::-1], 1)
        check.close(found, node.adjoint(v), node.adjoint(v.abs(), True))


@fuzz(quick=20, long=600)
@given(cases(), st.sets(st.sampled_from(["scan", "gate", "conv", "norm"])))
def test_some_components(case: Case, names: set[str]) -> None:
    check = Check(case)
    left, kept = check.node.operator.restrict(names), check.node.restrict(names)
    if left is None or kept is None:
        assert left is kept is None
        return
    check.coefficients = bool(left.tensors())
    v = case.randn(*case.shape)
    check.close(left.affine(v), kept.affine(v), kept.affine(v.abs(), True))
    check.close(left.per_channel().dense(None), kept.matrices, kept.bound)


# --- what tests share --------------------------------------------------------------------------


def factors(case: Case, varies: list[bool]) -> tuple[Tensor, Tensor]:
    """Row and column factors that vary along some dimensions."""
    sizes = [
        [full if along else 1 for full, along in zip(case.shape, half, strict=True)]
        for half in (varies[:4], varies[4:])
    ]
    return case.randn(*sizes[0]), case.randn(*sizes[1])


def parts(case: Case, longest: int) -> Iterator[slice]:
    """All tokens, so many at a time."""
    for start in range(0, case.shape.tokens, longest):
        yield slice(start, min(start + longest, case.shape.tokens))


def check_strip(check: Check, strip: Strip, rows: range, wanted: Tensor, bound: Tensor) -> None:
    assert strip.rows == rows
    assert strip.entries.shape == (len(wanted), len(rows), len(strip.columns))
    some = slice(rows.start, rows.stop)
    check.close(strip.whole(wanted.shape[-1]), wanted[:, some], bound)
