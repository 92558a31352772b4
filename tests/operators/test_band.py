"""Bands and shifts over tokens, held against loops over single tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from captum_ssm.operators import Chain, SelectiveScan, Shape, ShortConv, generic
from captum_ssm.operators.kernels.bands import add_shifted, convolve_band, shift_tokens
from captum_ssm.operators.kernels.portions import some_heads

EXACT = 1e-12
LAGS = [-9, -5, -4, -1, 0, 1, 3, 5, 8]
TOKENS = 5


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.mark.parametrize("lag", LAGS)
def test_shifted_tokens(lag: int) -> None:
    x = randn(3, 2, TOKENS, 4, 2)
    wanted = torch.zeros_like(x)
    for t in range(TOKENS):
        if 0 <= t - lag < TOKENS:
            wanted[:, :, t] = x[:, :, t - lag]
    assert torch.equal(shift_tokens(x, lag), wanted)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("ahead", LAGS)
def test_a_shifted_matrix_is_added(ahead: int, lag: int) -> None:
    """Shifts by as many tokens as there are, or more, add nothing."""
    out, matrix = randn(2, 3, TOKENS, TOKENS), randn(2, 3, TOKENS, TOKENS)
    wanted = out.clone()
    for i in range(TOKENS):
        for j in range(TOKENS):
            if 0 <= i - ahead < TOKENS and 0 <= j + lag < TOKENS:
                wanted[..., i, j] += matrix[..., i - ahead, j + lag]
    add_shifted(out, matrix, ahead, lag)
    assert torch.equal(out, wanted)


def test_a_convolution_after_a_band() -> None:
    """As matrices over tokens, of which several lags fall together."""
    heads, per_head = 3, 2
    taps = {lag: randn(heads, per_head) for lag in (-1, 0, 2)}
    band = {lag: randn(2, size, heads, 1) for lag, size in ((-2, TOKENS), (0, 1), (1, TOKENS))}
    x = randn(2, TOKENS, heads, per_head)

    def applied(factors: dict[int, Tensor], values: Tensor) -> Tensor:
        out = torch.zeros_like(values)
        for lag, factor in factors.items():
            out += factor.expand(2, TOKENS, heads, -1) * shift_tokens(values, lag)
        return out

    wanted = applied(taps, applied(band, x))
    product = convolve_band(taps, band, TOKENS)
    assert sorted(product) == [-3, -2, -1, 0, 1, 2, 3]
    assert (applied(product, x) - wanted).abs().max() <= EXACT * wanted.abs().max()


@pytest.mark.parametrize("heads", [range(1, 3), range(0, 4, 2), range(3, 0, -1), [2, 0, 2], [1]])
def test_heads_are_chosen_in_order(heads: range | list[int]) -> None:
    x = randn(2, 3, 4, 2)
    found = some_heads(x, heads)
    assert torch.equal(found, torch.stack([x[:, :, head] for head in heads], 2))
    neighbours = heads == range(1, 3)
    assert (found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == neighbours


@pytest.mark.parametrize("before", [(1,), (2,), (-1,), (11,), (0,), (0, 4)])
@pytest.mark.parametrize("after", [(3,), (-9,), (-2, 12)])
def test_a_recurrence_between_single_lags(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Also of lags beyond the ends, through which nothing passes."""
    tokens, heads = 7, 3
    shape = Shape(2, tokens, heads, 1)
    dt, a = torch.rand(2, tokens, heads).double(), -torch.rand(heads, 2).double()
    scan = SelectiveScan(dt, a, randn(2, tokens, 2), randn(2, tokens, 2))
    late, early = (ShortConv(randn(heads, 1, len(x)), shape, lags=x) for x in (before, after))
    operator = Chain(late, scan, early)
    left, right = randn(*shape), randn(*shape)
    for found, wanted in (
        (operator.contract(left, right), generic.contract(operator, left, right)),
        (operator.contract_heads(left, right), generic.contract_heads(operator, left, right)),
    ):
        scale = wanted.abs().max()
        assert (found - wanted).abs().max() <= EXACT * scale
