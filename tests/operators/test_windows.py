"""Operators within windows."""

from __future__ import annotations

import pytest
import torch
from operators.kinds import conv, diagonal
from operators.kinds import scan as selective_scan
from oracles import relative_error

from captum_ssm.operators import Chain, Diagonal, Mixing, Shape
from captum_ssm.operators.reorder import Windowed, Windows

#: Five tokens in three windows of two places.
PLACES = torch.tensor([[3, 0], [-1, 4], [1, 2]])


def test_cut_and_merge() -> None:
    windows = Windows(PLACES)
    x = torch.randn(4, 2, 5, 3, 2)
    cut = windows.cut(x)
    assert cut.shape == (4, 6, 2, 3, 2)
    for b in range(2):
        for w, held in enumerate(PLACES.tolist()):
            for place, token in enumerate(held):
                there = cut[:, 3 * b + w, place]
                assert torch.equal(there, x[:, b, token] if token >= 0 else torch.zeros(4, 3, 2))
    assert torch.equal(windows.merge(cut), x)
    y = torch.randn_like(cut)
    torch.testing.assert_close((cut * y).sum(), (x * windows.merge(y)).sum())
    padding = windows.padding(y)
    assert torch.equal(padding, y - windows.cut(windows.merge(y)))
    assert windows.tokens == 5 and Windows(PLACES[:1]).padding(y) is None


def test_padding_does_not_hide_what_is_not_finite() -> None:
    windows = Windows(PLACES)
    values = torch.full((3, 2, 1, 1), torch.inf)
    assert windows.padding(values).isinf().sum() == 1
    assert not windows.cut(torch.full((1, 5, 1, 1), torch.nan)).flatten()[2].isnan()


def test_restricting_keeps_what_padding_adds() -> None:
    windows, values = Windows(PLACES), torch.randn(6, 2, 5, 1).double()
    scan = selective_scan()(Shape(6, 2, 5, 1)).operator
    gate = Diagonal(torch.randn(6, 2, 5, 1).double(), scan.shape, "gate")
    whole = Windowed(Chain(gate, scan), windows, windows.padding(values))
    left = whole.restrict({"scan"})
    wanted = windows.merge(scan.apply(windows.padding(values)))
    assert wanted.any() and relative_error(left.offset(), wanted) <= 1e-12
    picked = left.select([4, 1])
    assert relative_error(picked.offset(), wanted[:, :, [4, 1]]) <= 1e-12
    assert whole.restrict({"skip"}) is None


@pytest.mark.parametrize("name", ["none", "fixed", "controlled"])
def test_mixing_is_that_within_windows(name: str) -> None:
    kinds = {"none": diagonal(), "fixed": conv(0, 1), "controlled": selective_scan()}
    inner = kinds[name](Shape(4, 2, 5, 1)).operator
    whole = Windowed(inner, Windows(torch.tensor([[0, 2], [3, 1]])))
    assert whole.mixing is Mixing(name)
    assert whole.mixes_tokens == (name != "none")
    assert whole.data_dependent == (name != "fixed")
