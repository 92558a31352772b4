"""Restricting an operator to some components."""

from __future__ import annotations

import torch
from operators.kinds import conv, diagonal, randn, scan
from oracles import relative_error, times

from captum_ssm.operators import Chain, DirectSum, Shape, Sum
from captum_ssm.operators.reorder import Windowed, Windows


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


# --- within windows ------------------------------------------------------------------------------

#: Five tokens in three windows of two places.
WINDOWS = Windows(torch.tensor([[3, 0], [-1, 4], [1, 2]]))


def test_padding_does_not_hide_what_is_not_finite() -> None:
    values = torch.full((3, 2, 1, 1), torch.inf)
    padding = WINDOWS.padding(values)
    assert padding is not None and padding.isinf().sum() == 1
    assert not WINDOWS.cut(torch.full((1, 5, 1, 1), torch.nan)).flatten()[2].isnan()


def test_restricting_keeps_what_padding_adds() -> None:
    core, gate = (kind(Shape(6, 2, 5, 1)).operator for kind in (scan(), diagonal()))
    padding = WINDOWS.padding(randn(6, 2, 5, 1))
    assert padding is not None
    whole = Windowed(Chain(gate, core), WINDOWS, padding)
    left = whole.restrict({"scan"})
    assert left is not None
    wanted, offset = WINDOWS.merge(core.apply(padding)), left.offset()
    assert offset is not None and wanted.any() and relative_error(offset, wanted) <= 1e-12
    picked = left.select([4, 1]).offset()
    assert picked is not None and relative_error(picked, wanted[:, :, [4, 1]]) <= 1e-12
    assert whole.restrict({"skip"}) is None
