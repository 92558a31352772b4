"""Operators side by side."""

from __future__ import annotations

from typing import Any

import torch
from oracles import relative_error, times

from captum_ssm.operators import Chain, Diagonal, Mixing, ShortConv, Sum
from captum_ssm.operators.combine import DirectSum


def test_a_part_of_which_nothing_is_left_passes_values_on(make: Any) -> None:
    scan, skip, conv = make.scan(7), make.diagonal(7, 5, 1, "skip"), make.conv(7, 2, 1)
    both = DirectSum(Sum(scan.operator, skip.operator), conv.operator)
    eye = torch.eye(7).double()
    left = {
        ("scan",): (scan.matrices, eye.expand(2, 2, 7, 7)),
        ("skip",): (skip.matrices, eye.expand(2, 2, 7, 7)),
        ("conv",): (eye.expand(2, 5, 7, 7), conv.matrices),
        ("scan", "conv"): (scan.matrices, conv.matrices),
    }
    v = torch.randn(2, 7, 7, 1).double()
    for components, parts in left.items():
        wanted = times(torch.cat(parts, 1), v)
        assert relative_error(both.restrict(components).apply(v), wanted) <= 1e-12
    assert both.restrict({"gate"}) is None


def test_heads_in_any_order(make: Any) -> None:
    scan, conv = make.scan(6, heads=3), make.conv(6, 4, 1, bias=(0, 0, 1, 1))
    both = DirectSum(scan.operator, conv.operator)
    matrices = torch.cat([scan.matrices, conv.matrices], 1)
    heads = [5, 0, 2, 6, 1, 1, 3]
    picked = both.select(heads)
    assert picked.shape == (2, 6, 7, 1)
    assert relative_error(picked.dense(None), matrices[:, heads]) <= 1e-12
    assert torch.equal(picked.offset(), both.offset()[:, :, heads])


def test_mixing_is_that_of_the_freest_part(make: Any) -> None:
    cases = make.diagonal(5, 2, 1), make.conv(5, 3, 1), make.scan(5)
    gate, conv, scan = (case.operator for case in cases)
    gated = Chain(make.diagonal(5, 3, 1).operator, conv)
    one = Diagonal(torch.ones(1, 1, 1, 1), gate.shape)
    assert DirectSum(gate, one).mixing is Mixing.NONE
    assert DirectSum(conv, gate).mixing is Mixing.FIXED
    assert DirectSum(one, gated, conv).mixing is Mixing.GATED
    assert DirectSum(conv, scan, one).mixing is Mixing.CONTROLLED
    assert not DirectSum(one, conv).data_dependent and DirectSum(gate, conv).data_dependent
    still = ShortConv(torch.ones(2, 1, 1), one.shape)
    assert not DirectSum(one, still).mixes_tokens and DirectSum(one, conv).mixes_tokens
