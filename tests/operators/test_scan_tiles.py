"""Tiles of a scan's rows against its matrices, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
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


def drawn(tokens: int, lags: tuple[int, ...], fastest: float) -> tuple[ScanRows, Tensor]:
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


SOME_TOKENS, SOME_LAGS = st.integers(1, 23), st.sampled_from([(0,), (0, 1, 2, 3), (2, 5)])
SIZES, SPEEDS = st.sampled_from([1, 4, 64]), st.sampled_from([2.0, 1e4])
FLAGS = st.sampled_from([False, True])


@settings(max_examples=40)
@given(SOME_TOKENS, SOME_LAGS, SIZES, SPEEDS, FLAGS, FLAGS, st.integers(1, 3))
@example(23, (0, 1, 2, 3), 4, 2.0, True, False, 1)
@example(23, (0, 1, 2, 3), 4, 2.0, False, True, 3)
def test_rows(
    tokens: int, lags: tuple[int, ...], sources: int, fastest: float, looped: bool, both_ways: bool,
    stride: int,
) -> None:  # fmt: skip
    """As on a processor, and as where launches cost more; states may decay at once."""
    positions = list(range(tokens - 1, -1, -stride))[::-1]
    out = torch.zeros(BATCH, len(positions), tokens, HEADS, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_tiles, "_SOURCES", sources)
        patch.setattr(scan_tiles, "_TILE_ELEMENTS", BATCH * HEADS * sources * 3)
        (rows, expected), back = drawn(tokens, lags, fastest), None
        if both_ways:
            back, reverse = drawn(tokens, lags, fastest)
            expected = expected + reverse.flip(1, 2)
        for each in (rows, back):
            if each is not None and not looped:
                each._outputs = None
        for which, some, entries in tiles(rows, back, positions):
            assert not out[:, which, some].any()  # every entry comes once
            out[:, which, some] = entries
    torch.testing.assert_close(out, expected[:, positions], atol=1e-14, rtol=1e-7)
