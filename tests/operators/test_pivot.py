"""Strips cut at a pivot, held against explicit matrices and against the tree."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from captum_ssm.operators import ElementwiseRecurrence, SelectiveScan
from captum_ssm.operators.kernels import pivot_strip
from captum_ssm.operators.kernels.pivot_strip import from_pivot, strip_by_pivot

EXACT = 1e-12


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def scan(tokens: int, heads: int = 5, states: int = 3, groups: int = 0) -> tuple:
    """A selective scan whose steps are sometimes 0 or huge, and its matrices."""
    dt = randn(2, tokens, heads).exp()
    dt[torch.rand_like(dt) < 0.1] = 0
    dt[torch.rand_like(dt) < 0.02] = 80
    a = -0.1 * randn(heads, states).exp()
    a[0] = 0
    size = (2, tokens, groups, states) if groups else (2, tokens, states)
    b, c = randn(*size), randn(*size)
    each = [x.repeat_interleave(heads // groups, 2) if groups else x for x in (b, c)]
    if not groups:
        return SelectiveScan(dt, a, b, c), oracles.scan_matrices(dt, a, b, c)
    found = [
        oracles.scan_matrices(dt[:, :, h : h + 1], a[h : h + 1], *(x[:, :, h] for x in each))
        for h in range(heads)
    ]
    return SelectiveScan(dt, a, b, c), torch.cat(found, 1)


def elementwise(tokens: int, heads: int = 5) -> tuple:
    """A recurrence that sometimes forgets everything, and its matrices."""
    decay = torch.rand(2, tokens, heads, dtype=torch.float64) ** 0.1
    decay[torch.rand_like(decay) < 0.05] = 0
    matrices = torch.zeros(2, heads, tokens, tokens, dtype=torch.float64)
    for j in range(tokens):
        product = torch.ones(2, heads, dtype=torch.float64)
        for i in range(j, tokens):
            product = product * decay[:, i] if i > j else product
            matrices[:, :, i, j] = product
    return ElementwiseRecurrence(decay), matrices


KINDS = {
    "scan": scan,
    "scan of one state": lambda tokens: scan(tokens, states=1),
    "scan by groups": lambda tokens: scan(tokens, heads=6, groups=2),
    "elementwise": elementwise,
}


def product(matrices: Tensor, left: Tensor, band: dict[int, Tensor]) -> Tensor:
    """Sum over channels of left[i] (alpha band)[i, j], entry by entry of the band."""
    tokens = matrices.shape[-1]
    out = torch.zeros(2, tokens, tokens, dtype=torch.float64)
    for lag, factor in band.items():
        for column in range(max(0, -lag), min(tokens, tokens - lag)):
            at = column + lag
            weighted = left[..., 0] * matrices[..., at].mT * factor[:, at, None, :, 0]
            out[:, :, column] += weighted.sum(-1)
    return out


LAGS = st.one_of(
    st.sampled_from([(0,), (0, 1, 2, 3), (-1, 0, 1), (5,), (-4,), (30,), (-30,), (3, 4, 6)]),
    st.lists(st.integers(-6, 9), min_size=1, max_size=4, unique=True).map(tuple),
)


@pytest.mark.full
@settings(max_examples=40)
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), lags=LAGS)
def test_rows_of_products(data: st.DataObject, kind: str, lags: tuple[int, ...]) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    tokens = data.draw(st.integers(2, 40))
    start = data.draw(st.integers(1, tokens - 1))
    rows = range(start, data.draw(st.integers(start + 1, tokens)))
    operator, matrices = KINDS[kind](tokens)
    left = randn(*operator.shape)
    band = {lag: randn(*operator.shape) for lag in lags}
    wanted = product(matrices, left, band)[:, rows.start : rows.stop]
    for columns in (3, 512):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pivot_strip, "_COLUMNS", columns)
            found = strip_by_pivot(operator, left, band, rows)
        assert found.rows == rows
        error = (found.whole(tokens) - wanted).abs().max()
        assert error <= EXACT * max(1.0, float(wanted.abs().max()))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_later_rows_are_cut_by_themselves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, matrices = KINDS[kind](pivot_strip.LEAST + 30)
    left, right = randn(*operator.shape), randn(*operator.shape)
    wanted = product(matrices, left, {0: right})
    asked, cut = [], pivot_strip.strip_by_pivot
    monkeypatch.setattr(
        pivot_strip, "strip_by_pivot", lambda *args: asked.append(args[3]) or cut(*args)
    )
    for rows in (range(0, 50), range(50, 70), range(70, 94), range(80, 81)):
        found = operator.strip(left, right, rows).whole(pivot_strip.LEAST + 30)
        error = (found - wanted[:, rows.start : rows.stop]).abs().max()
        assert error <= EXACT * wanted.abs().max()
    assert asked == [range(70, 94), range(80, 81)]


@pytest.mark.parametrize("kind", KINDS)
def test_few_channels_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, matrices = KINDS[kind](30)
    left, band = randn(*operator.shape), {lag: randn(*operator.shape) for lag in (0, 2)}
    wanted = product(matrices, left, band)[:, 20:]
    for elements in (1, 500):
        monkeypatch.setattr(pivot_strip, "_ELEMENTS", elements)
        found = strip_by_pivot(operator, left, band, range(20, 30)).whole(30)
        assert (found - wanted).abs().max() <= EXACT * wanted.abs().max()


def test_float32_over_a_thousand_tokens() -> None:
    tokens = 1000
    dt, a = 0.05 * torch.randn(1, tokens, 4).exp(), -torch.randn(4, 8).exp()
    b, c = torch.randn(1, tokens, 8), torch.randn(1, tokens, 8)
    exact = SelectiveScan(*(x.double() for x in (dt, a, b, c)))
    one, rows = torch.ones(1, 1, 1, 1), range(700, tokens)
    wanted = exact.dense("mean")[:, 700:]
    found = SelectiveScan(dt, a, b, c).strip(one / 4, one, rows).whole(tokens)
    assert found.dtype == torch.float32
    assert oracles.relative_error(found, wanted) <= 2e-6


@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("tokens, at", [(1, 0), (2, 0), (2, 1), (70, 0), (70, 35), (97, 96)])
def test_sums_and_products_from_a_token(multiply: bool, tokens: int, at: int) -> None:
    steps = torch.rand(2, tokens, 3)
    kept = steps.clone()
    found = from_pivot(steps, at, product=multiply)
    assert found.dtype == torch.float64
    combine = torch.prod if multiply else torch.sum
    for t in range(tokens):
        between = steps[:, min(t, at) + 1 : max(t, at) + 1].double()
        torch.testing.assert_close(found[:, t], combine(between, 1), rtol=1e-13, atol=0)
    assert torch.equal(steps, kept)


@pytest.mark.parametrize("lags", [(63,), (64,), (100, 95), (140,)])
def test_bands_that_reach_further_back_than_a_pivot_lies(lags: tuple[int, ...]) -> None:
    operator, matrices = elementwise(150)
    left, band = randn(*operator.shape), {lag: randn(*operator.shape) for lag in lags}
    wanted = torch.zeros(2, 150, 150, dtype=torch.float64)
    for lag, factor in band.items():
        product = torch.einsum("bic,bcij,bjc->bij", left[..., 0], matrices, factor[..., 0])
        wanted[:, :, : 150 - lag] += product[:, :, lag:]
    for rows in (range(64, 70), range(120, 150)):
        found = operator.strip_of_product(left, band, rows).whole(150)
        error = (found - wanted[:, rows.start : rows.stop]).abs().max()
        assert error <= EXACT * wanted.abs().max()


@pytest.mark.parametrize("reset", range(8, 20))
def test_resets_while_a_band_writes(reset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a column was sent before the reset is gone, and what it was sent after is not."""
    monkeypatch.setattr(pivot_strip, "_COLUMNS", 4)
    decay = torch.full((2, 30, 5), 0.9, dtype=torch.float64)
    decay[:, reset] = 0
    operator = ElementwiseRecurrence(decay)
    left, band = randn(*operator.shape), {lag: randn(*operator.shape) for lag in (0, 2)}
    wanted = product(operator.dense(None), left, band)[:, 20:]
    found = strip_by_pivot(operator, left, band, range(20, 30)).whole(30)
    assert (found - wanted).abs().max() <= EXACT * wanted.abs().max()
