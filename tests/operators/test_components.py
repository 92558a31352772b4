"""Restricting an operator to some components, and how chains and sums are put together."""

from __future__ import annotations

import torch
from operators.kinds import conv, diagonal, scan
from oracles import conv_matrices, diagonal_matrices, relative_error, scan_matrices, times
from torch import Tensor

from captum_ssm.operators import (
    Chain,
    Diagonal,
    DirectSum,
    Mixing,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
)


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


class Parts:
    """gate . (scan + skip) . mask . conv with bias, and the matrices of each."""

    def __init__(self) -> None:
        self.shape = shape = Shape(2, 7, 4, 1)
        gate, skip, mask = randn(*shape), randn(1, 1, 4, 1), (randn(2, 7, 1, 1) > 0).double()
        weight, self.bias = randn(4, 1, 3), randn(1, 1, 4, 1)
        dt, a = randn(2, 7, 4).exp(), -randn(4, 2).exp()
        b, c = randn(2, 7, 2), randn(2, 7, 2)
        self.operator = Chain(
            Diagonal(gate, shape, "gate"),
            Sum(SelectiveScan(dt, a, b, c), Diagonal(skip, shape, "skip")),
            Diagonal(mask, shape),
            ShortConv(weight, shape, self.bias),
        )
        self.gate = diagonal_matrices(gate, shape)
        self.scan = scan_matrices(dt, a, b, c)
        self.skip = diagonal_matrices(skip, shape)
        self.mask = diagonal_matrices(mask, shape)
        self.conv = conv_matrices(weight, range(3), shape)

    def check(self, components: set[str], matrices: Tensor) -> None:
        kept = self.operator.restrict(components)
        assert kept is not None
        assert relative_error(kept.dense(None), matrices) <= 1e-12
        assert relative_error(kept.dense(), matrices.mean(1)) <= 1e-12


def test_restrict_keeps_the_named_and_the_structural() -> None:
    p = Parts()
    p.check({"gate", "scan", "skip", "conv"}, p.gate @ (p.scan + p.skip) @ p.mask @ p.conv)
    p.check({"gate", "scan", "conv"}, p.gate @ p.scan @ p.mask @ p.conv)
    p.check({"gate", "skip", "conv"}, p.gate @ p.skip @ p.mask @ p.conv)
    p.check({"scan", "skip"}, (p.scan + p.skip) @ p.mask)
    p.check({"scan"}, p.scan @ p.mask)
    p.check({"gate"}, p.gate @ p.mask)
    p.check({"conv"}, p.mask @ p.conv)
    p.check(set(), p.mask.expand(2, 4, 7, 7))


def test_restrict_takes_any_collection() -> None:
    p = Parts()
    for components in (["scan", "gate"], ("gate", "scan"), frozenset({"scan", "gate"})):
        kept = p.operator.restrict(components)
        assert kept is not None
        assert relative_error(kept.dense(None), p.gate @ p.scan @ p.mask) <= 1e-12


def test_restrict_leaves_the_whole_alone() -> None:
    p = Parts()
    p.operator.restrict({"scan"})
    whole = p.gate @ (p.scan + p.skip) @ p.mask @ p.conv
    assert relative_error(p.operator.dense(None), whole) <= 1e-12


def test_a_bias_goes_with_its_component() -> None:
    p = Parts()
    with_conv = p.operator.restrict({"scan", "conv"})
    without = p.operator.restrict({"scan", "gate"})
    assert with_conv is not None and without is not None
    wanted = times(p.scan @ p.mask, p.bias.expand(p.shape))
    offset = with_conv.offset()
    assert offset is not None
    assert relative_error(offset, wanted) <= 1e-12
    assert without.offset() is None


def test_nothing_left_is_none() -> None:
    shape = Shape(1, 3, 2, 1)
    gate, skip = Diagonal(randn(*shape), shape, "gate"), Diagonal(randn(*shape), shape, "skip")
    assert gate.restrict({"scan"}) is None
    assert Chain(gate, skip).restrict({"conv"}) is None
    assert Sum(gate, skip).restrict({"conv"}) is None
    assert Chain(gate, Sum(gate, skip)).restrict(()) is None
    assert gate.restrict({"gate"}) is gate
    mask = Diagonal(randn(*shape), shape)
    assert mask.restrict(()) is mask


def test_chains_are_flat_and_named() -> None:
    a, b, c = (kind(Shape(2, 4, 3, 2)).operator for kind in (diagonal(), conv(0, 1), diagonal()))
    assert Chain(Chain(a, b), Chain(c)).parts == (a, b, c)
    assert list(Chain(a, Sum(b, Chain(c, a))).leaves()) == [a, b, c, a]


def test_default_components() -> None:
    p = Parts()
    assert [leaf.component for leaf in p.operator.leaves()] == [
        "gate",
        "scan",
        "skip",
        None,
        "conv",
    ]


def test_order_of_a_chain() -> None:
    """The last operator acts first: a shift and a scaling do not commute."""
    shape = Shape(1, 3, 1, 1)
    scale = Diagonal(torch.tensor([2.0, 3.0, 5.0]).view(1, 3, 1, 1), shape)
    shift = ShortConv(torch.ones(1, 1, 1), shape, lags=[1])
    v = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    assert Chain(scale, shift).apply(v).flatten().tolist() == [0, 3, 50]
    assert Chain(shift, scale).apply(v).flatten().tolist() == [0, 2, 30]


# --- operators side by side ----------------------------------------------------------------------


def test_a_part_of_which_nothing_is_left_passes_values_on() -> None:
    first, skip = scan()(Shape(2, 7, 5, 1)), diagonal((1, 1, 1, 1), "skip")(Shape(2, 7, 5, 1))
    last = conv(0, 1)(Shape(2, 7, 2, 1))
    both = DirectSum(Sum(first.operator, skip.operator), last.operator)
    eye = torch.eye(7).double()
    left = {
        ("scan",): (first.exact(), eye.expand(2, 2, 7, 7)),
        ("skip",): (skip.exact(), eye.expand(2, 2, 7, 7)),
        ("conv",): (eye.expand(2, 5, 7, 7), last.exact()),
        ("scan", "conv"): (first.exact(), last.exact()),
    }
    v = torch.randn(2, 7, 7, 1).double()
    for components, parts in left.items():
        kept = both.restrict(components)
        assert kept is not None
        assert relative_error(kept.apply(v), times(torch.cat(parts, 1), v)) <= 1e-12
    assert both.restrict({"gate"}) is None


def test_mixing_is_that_of_the_freest_part() -> None:
    shape = Shape(2, 5, 3, 1)
    gate, fixed, scanned = (kind(shape).operator for kind in (diagonal(), conv(0, 1), scan()))
    gated, one = Chain(gate, fixed), Diagonal(torch.ones(1, 1, 1, 1), shape)
    assert DirectSum(gate, one).mixing is Mixing.NONE
    assert DirectSum(fixed, gate).mixing is Mixing.FIXED
    assert DirectSum(one, gated, fixed).mixing is Mixing.GATED
    assert DirectSum(fixed, scanned, one).mixing is Mixing.CONTROLLED
    assert not DirectSum(one, fixed).data_dependent and DirectSum(gate, fixed).data_dependent
    assert not DirectSum(one, gate).mixes_tokens and DirectSum(one, fixed).mixes_tokens
