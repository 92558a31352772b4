"""Tiles of a scan's rows against its matrices, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from captum_ssm.operators import SelectiveScan
from captum_ssm.operators.readings import scan_tiles
from captum_ssm.operators.readings.scan_tiles import ScanRows, tiles

BATCH, HEADS, STATE = 2, 3, 4


def by_loops(scan: SelectiveScan, shares: dict[int, Tensor], front: Tensor, skip: Tensor) -> Tensor:
    """rows[b, i, j, h] by the definition: a sum over what token j sends to each token t <= i."""
    batch, tokens, heads, _ = scan.shape
    out = torch.zeros(batch, tokens, tokens, heads, dtype=front.dtype)
    for i in range(tokens):
        for t in range(i + 1):
            decay = torch.exp(scan.a * scan.dt[:, t + 1 : i + 1].sum(1)[..., None])  # (B, H, N)
            alpha = (scan.c[:, None, i] * decay * scan.b[:, None, t]).sum(-1) * scan.dt[:, t]
            alpha = alpha + skip[:, t] * (i == t)
            for lag, share in shares.items():
                if t - lag >= 0:
                    out[:, i, t - lag] += front[:, i] * alpha * share[:, t]
    return out


def drawn(tokens: int, lags: tuple[int, ...], fastest: float = 2.0) -> tuple[ScanRows, Tensor]:
    options = {"dtype": torch.float64}
    scan = SelectiveScan(
        torch.rand(BATCH, tokens, HEADS, **options),
        -fastest * torch.rand(HEADS, STATE, **options),
        torch.randn(BATCH, tokens, STATE, **options),
        torch.randn(BATCH, tokens, STATE, **options),
    )
    shares = {lag: torch.randn(BATCH, tokens, HEADS, **options) for lag in lags}
    front, skip = torch.randn(2, BATCH, tokens, HEADS, **options)
    return ScanRows(scan, shares, front, skip), by_loops(scan, shares, front, skip)


def put_together(
    rows: ScanRows, positions: list[int], tokens: int, back: ScanRows | None = None
) -> Tensor:
    out = torch.zeros(BATCH, len(positions), tokens, HEADS, dtype=torch.float64)
    for which, sources, entries in tiles(rows, back, positions):
        assert not out[:, which, sources].any()  # every entry comes once
        out[:, which, sources] = entries
    return out


@pytest.mark.parametrize("tokens", [1, 2, 5, 23])
@pytest.mark.parametrize("lags", [(0,), (0, 1, 2, 3), (2, 5)])
@pytest.mark.parametrize("sources", [1, 4, 64])
@pytest.mark.parametrize("looped", [True, False])
def test_all_rows(
    looped: bool,
    tokens: int,
    lags: tuple[int, ...],
    sources: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a processor, and as where launches cost more."""
    monkeypatch.setattr(scan_tiles, "_SOURCES", sources)
    monkeypatch.setattr(scan_tiles, "_TILE_ELEMENTS", BATCH * HEADS * sources * 3)
    rows, expected = drawn(tokens, lags)
    if not looped:
        rows._outputs = None
    torch.testing.assert_close(put_together(rows, list(range(tokens)), tokens), expected)


@pytest.mark.parametrize("positions", [[0], [18], [3, 4, 9], [0, 7, 8, 17]])
def test_some_rows(positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_tiles, "_SOURCES", 4)
    rows, expected = drawn(19, (0, 1, 3))
    torch.testing.assert_close(put_together(rows, positions, 19), expected[:, positions])


@pytest.mark.parametrize("looped", [True, False])
def test_states_that_decay_at_once_leave_zeros(
    looped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_tiles, "_SOURCES", 2)
    rows, expected = drawn(15, (0, 1), fastest=1e4)
    if not looped:
        rows._outputs = None
    found = put_together(rows, list(range(15)), 15)
    torch.testing.assert_close(found, expected, atol=1e-200, rtol=1e-7)


@pytest.mark.parametrize("tokens", [1, 2, 5, 23])
@pytest.mark.parametrize("lags", [(0,), (0, 1, 2, 3), (2, 5)])
@pytest.mark.parametrize("sources", [1, 4, 64])
def test_both_directions(
    tokens: int, lags: tuple[int, ...], sources: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_tiles, "_SOURCES", sources)
    monkeypatch.setattr(scan_tiles, "_TILE_ELEMENTS", BATCH * HEADS * sources * 3)
    ahead, expected = drawn(tokens, lags)
    back, reverse = drawn(tokens, lags)
    expected = expected + reverse.flip(1, 2)
    for positions in (range(tokens), range(0, tokens, 3), [tokens - 1], [0]):
        found = put_together(ahead, list(positions), tokens, back)
        torch.testing.assert_close(found, expected[:, list(positions)])
