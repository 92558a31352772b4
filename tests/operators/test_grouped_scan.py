"""Selective scans whose input and output vectors differ between groups of heads."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error, scan_matrices, times
from torch import Tensor

from captum_ssm.operators import SelectiveScan
from captum_ssm.operators.recurrences import selective_scan


def drawn(groups: int, tokens: int = 11) -> tuple[SelectiveScan, Tensor]:
    """A scan of 6 channels, and its matrices (B, 6, L, L) group by group."""
    dt = torch.rand(2, tokens, 6, dtype=torch.float64)
    a = -torch.rand(6, 3, dtype=torch.float64)
    b, c = torch.randn(2, 2, tokens, groups, 3, dtype=torch.float64)
    each = 6 // groups
    matrices = [
        scan_matrices(
            dt[..., g * each : (g + 1) * each],
            a[g * each : (g + 1) * each],
            b[:, :, g],
            c[:, :, g],
        )
        for g in range(groups)
    ]
    return SelectiveScan(dt, a, b, c), torch.cat(matrices, 1)


@pytest.mark.parametrize("tokens", [1, 2, 11, 70])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups(groups: int, tokens: int) -> None:
    scan, wanted = drawn(groups, tokens)
    v = torch.randn(4, 2, tokens, 6, 1, dtype=torch.float64)
    assert relative_error(scan.apply(v), times(wanted, v)) <= 1e-12
    assert relative_error(scan.transpose(v), times(wanted.mT, v)) <= 1e-12
    assert relative_error(scan.dense(None), wanted) <= 1e-12
    assert relative_error(scan.dense("mean"), wanted.mean(1)) <= 1e-12
    left, right = torch.randn(2, 2, tokens, 6, 1, dtype=torch.float64)
    contracted = torch.einsum("bic,bcij,bjc->bij", left[..., 0], wanted, right[..., 0])
    assert relative_error(scan.contract(left, right), contracted) <= 1e-12


@pytest.mark.parametrize("heads", [[0], [5, 1], [2, 3, 2]])
def test_selected_heads_keep_their_group(heads: list[int]) -> None:
    scan, wanted = drawn(2)
    assert relative_error(scan.select(heads).dense(None), wanted[:, heads]) <= 1e-12
    chosen = wanted[:, heads].mean(1)
    assert relative_error(scan.select(heads).dense("mean"), chosen) <= 1e-12


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("elements", [1, 10**9])
def test_what_runs_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tokens: int, groups: int, elements: int
) -> None:
    """Odd-even reduction and products with chunks' matrices equal the loop over tokens."""
    for name in ("_CHUNK_ELEMENTS", "_REDUCED_ELEMENTS"):
        monkeypatch.setattr(selective_scan, name, elements)
    scan, _ = drawn(groups or 1, tokens)
    if not groups:
        scan = SelectiveScan(scan.dt, scan.a, scan.b[:, :, 0], scan.c[:, :, 0])
    for lead in ((), (7,)):
        v = torch.randn(*lead, *scan.shape, dtype=torch.float64)
        for transposed, wanted in ((False, scan.apply(v)), (True, scan.transpose(v))):
            for way in (selective_scan._by_products, selective_scan._by_reduction):
                assert relative_error(way(scan, v, transposed), wanted) <= 1e-12
