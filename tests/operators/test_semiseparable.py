"""Sums of semiseparable matrices, alone and times a band, against sums written out."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from oracles.kernels import banded_semiseparable
from torch import Tensor

from captum_ssm.operators.kernels import pivot_tree
from captum_ssm.operators.kernels.pivot_tree import semiseparable_strip

Factors = tuple[Tensor, Tensor, list[Tensor]]


def drawn(batch: int, tokens: int, lags: int, width: int = 3) -> Factors:
    """Decays with resets and without any decay among them, row factors, column factors by lag."""
    decay = torch.rand(batch, tokens, width, dtype=torch.float64)
    decay = decay.where(torch.rand_like(decay) > 0.1, torch.randint_like(decay, 2))
    rows, *columns = torch.randn(lags + 1, batch, tokens, width, dtype=torch.float64)
    return decay, rows, columns


def strip_of(factors: list[Factors], rows: range, first_lag: int) -> Tensor:
    """The rows by the tree, which overwrites copies."""
    batch, tokens, _ = factors[0][0].shape
    until, some = slice(rows.stop), slice(rows.start, rows.stop)
    copies = (
        (decay[:, until].clone(), u[:, some].clone(), [v[:, until].clone() for v in columns])
        for decay, u, columns in factors
    )
    return semiseparable_strip(copies, batch, tokens, rows, first_lag).whole(tokens)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 16, 17, 31, 33])
@pytest.mark.parametrize("batch", [1, 2, 11])
def test_any_length_and_batch(batch: int, tokens: int) -> None:
    """Even and ragged trees; products by example and by pair."""
    factors = [drawn(batch, tokens, 1, width) for width in (3, 3, 2)]
    wanted = sum(banded_semiseparable(*f, 0) for f in factors)
    assert relative_error(strip_of(factors, range(tokens), 0), wanted) <= 1e-12


@pytest.mark.parametrize("first_lag, lags", [(0, 4), (-2, 3), (2, 2), (-1, 1), (1, 1), (-9, 5)])
@pytest.mark.parametrize("tokens", [1, 3, 6, 17])
def test_band(tokens: int, first_lag: int, lags: int) -> None:
    factors = [drawn(2, tokens, lags) for _ in range(2)]
    wanted = sum(banded_semiseparable(*f, first_lag) for f in factors)
    found = strip_of(factors, range(tokens), first_lag)
    assert float((found - wanted).abs().max()) <= 1e-12 * (1 + float(wanted.abs().max()))


@pytest.mark.parametrize(
    "rows", [range(0, 1), range(0, 5), range(3, 4), range(3, 13), range(12, 13)]
)
@pytest.mark.parametrize("first_lag", [-1, 0, 2])
def test_some_rows(rows: range, first_lag: int) -> None:
    factors = drawn(2, 13, 3)
    wanted = banded_semiseparable(*factors, first_lag)[:, rows.start : rows.stop]
    found = strip_of([factors], rows, first_lag)
    assert float((found - wanted).abs().max()) <= 1e-12 * (1 + float(wanted.abs().max()))


def test_factors_in_any_memory_layout() -> None:
    decay, u, (v,) = drawn(3, 9, 1)
    wanted = banded_semiseparable(decay, u, [v], 0)
    decay, u, v = (x.mT.contiguous().mT for x in (decay, u, v))
    found = semiseparable_strip([(decay, u, [v])], 3, 9, range(9)).entries
    assert relative_error(found, wanted) <= 1e-12


@pytest.mark.parametrize("tokens", [255, 257])
def test_float32_is_accurate(tokens: int) -> None:
    decay, u, (v,) = drawn(1, tokens, 1, 16)
    decay = 1 - decay * torch.logspace(-4, 0, 16).double()
    decay, u, v = (x.float() for x in (decay, u, v))
    wanted = banded_semiseparable(decay.double(), u.double(), [v.double()], 0)
    assert relative_error(strip_of([(decay, u, [v])], range(tokens), 0), wanted) <= 2e-6


@pytest.mark.parametrize("rate", [0.01, 0.5, 5.0])
@pytest.mark.parametrize("batch, tokens", [(1, 128), (1, 256), (3, 193), (2, 300)])
@pytest.mark.parametrize("first_lag, lags", [(0, 1), (-1, 4)])
def test_what_is_forgotten(
    batch: int, tokens: int, rate: float, first_lag: int, lags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large blocks meet near their pivots alone, and nothing is missing."""
    fading = drawn(batch, tokens, lags)
    fading[0].copy_((-rate * (0.8 + 0.4 * torch.rand_like(fading[0]))).exp())
    lasting = drawn(batch, tokens, lags)
    lasting[0].clamp_(min=0.999)
    windows = []
    near = pivot_tree._Tree.near

    def noted(tree: pivot_tree._Tree, first: int, window: int) -> None:
        windows.append(window)
        near(tree, first, window)

    monkeypatch.setattr(pivot_tree._Tree, "near", noted)
    factors = [fading, lasting, fading]
    wanted = sum(banded_semiseparable(*f, first_lag) for f in factors)
    assert relative_error(strip_of(factors, range(tokens), first_lag), wanted) <= 1e-12
    # of the three blocks of channels, those that fade fast enough
    assert len(windows) == {0.01: 0, 0.5: 2 if tokens > 128 else 0, 5.0: 2}[rate]


def test_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        semiseparable_strip([], 1, 3, range(3))
