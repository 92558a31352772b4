"""Short convolutions against torch's own, and by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import relative_error

from captum_ssm.operators import Chain, Shape, ShortConv, generic


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 12])
def test_causal_lags_are_a_left_padded_conv1d(kernel: int, tokens: int) -> None:
    weight = torch.randn(6, 1, kernel, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    x = torch.randn(2, tokens, 6, dtype=torch.float64)
    wanted = F.conv1d(F.pad(x.mT, (kernel - 1, 0)), weight, bias, groups=6).mT
    by_lag = weight.flip(-1).view(3, 2, kernel)
    operator = ShortConv(by_lag, Shape(2, tokens, 3, 2), bias.view(1, 1, 3, 2))
    found = operator.affine(x.view(2, tokens, 3, 2)).flatten(2)
    assert relative_error(found, wanted) <= 1e-13


def test_lags_by_hand() -> None:
    """y[t] = 2 x[t + 1] + 3 x[t] + 5 x[t - 2]"""
    shape = Shape(1, 4, 1, 1)
    operator = ShortConv(torch.tensor([[[2.0, 3.0, 5.0]]]), shape, lags=[-1, 0, 2])
    wanted = [[3, 2, 0, 0], [0, 3, 2, 0], [5, 0, 3, 2], [0, 5, 0, 3]]
    assert operator.dense()[0].tolist() == wanted
    assert operator.rows([2])[0, 0].tolist() == wanted[2]
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 4, 1, 1)
    assert operator.apply(x).flatten().tolist() == [23, 230, 2305, 3050]
    assert operator.transpose(x).flatten().tolist() == [503, 5032, 320, 3200]


def test_one_lag_twice() -> None:
    """Two taps at the same lag add up."""
    shape = Shape(1, 3, 1, 1)
    operator = ShortConv(torch.tensor([[[2.0, 3.0]]]), shape, lags=[1, 1])
    wanted = [[0, 0, 0], [5, 0, 0], [0, 5, 0]]
    assert operator.rows(range(3))[0].tolist() == wanted
    assert operator.dense()[0].tolist() == wanted


@pytest.mark.parametrize("tokens", [1, 2, 3, 6])
def test_taps_that_cross_both_ends(tokens: int) -> None:
    """Looking ahead and back again loses what left the sequence on the way."""
    shape = Shape(1, tokens, 1, 1)
    ahead = ShortConv(torch.tensor([[[1.0, 7.0]]]).double(), shape, lags=[-2, 1])
    back = ShortConv(torch.tensor([[[3.0, 11.0]]]).double(), shape, lags=[2, -1])
    chain = Chain(back, ahead)
    wanted = torch.zeros(tokens, tokens).double()
    for outer, factor in ((2, 3.0), (-1, 11.0)):
        for inner, weight in ((-2, 1.0), (1, 7.0)):
            for t in range(tokens):
                middle, source = t - outer, t - outer - inner
                if 0 <= middle < tokens and 0 <= source < tokens:
                    wanted[t, source] += factor * weight
    assert torch.equal(chain.dense()[0], wanted)
    one = torch.ones(1, 1, 1, 1).double()
    assert torch.equal(generic.contract(chain, one, one)[0], wanted)
