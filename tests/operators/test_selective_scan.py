"""The selective scan at the edges of its range and of float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error, scan_matrices, times
from torch import Tensor

from captum_ssm.operators import Chain, Diagonal, SelectiveScan, Shape, ShortConv
from captum_ssm.operators.recurrences import selective_scan

# for any draw, of sums over up to 1024 tokens; typical is 3e-7
FLOAT32 = 1e-5


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def check_everything(operator: SelectiveScan, tolerance: float) -> None:
    alpha = scan_matrices(operator.dt, operator.a, operator.b, operator.c)
    v = torch.randn(operator.shape).to(operator.dt)
    found = {
        "apply": (operator.apply(v), times(alpha, v)),
        "transpose": (operator.transpose(v), times(alpha.mT, v)),
        "dense": (operator.dense(), alpha.mean(1)),
        "channels": (operator.dense(None), alpha),
    }
    for name, (is_, wanted) in found.items():
        assert torch.isfinite(is_).all(), name
        assert relative_error(is_, wanted) <= tolerance, name


def test_by_hand() -> None:
    """Three tokens, one channel, one state, decays of 1/2 and 1/4."""
    half = torch.log(torch.tensor(2.0, dtype=torch.float64))
    operator = SelectiveScan(
        dt=torch.tensor([3.0, 1.0, 2.0]).double().view(1, 3, 1),
        a=-half.view(1, 1),
        b=torch.tensor([1.0, 2.0, -1.0]).double().view(1, 3, 1),
        c=torch.tensor([10.0, 100.0, 1000.0]).double().view(1, 3, 1),
    )
    wanted = [[30, 0, 0], [150, 200, 0], [375, 500, -2000]]
    torch.testing.assert_close(operator.dense()[0], torch.tensor(wanted).double())
    torch.testing.assert_close(operator.rows([2])[0, 0], torch.tensor(wanted[2]).double())


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0.0, 1e-6, 80.0, 1e4])
def test_extreme_steps(step: float, dtype: torch.dtype, tokens: int) -> None:
    """Steps of 80 forget everything before, and their decays underflow, without harm."""
    operator = SelectiveScan(
        torch.full((2, tokens, 3), step, dtype=dtype),
        -torch.rand(3, 4, dtype=dtype) - 0.5,
        torch.randn(2, tokens, 4, dtype=dtype),
        torch.randn(2, tokens, 4, dtype=dtype),
    )
    if step == 0:
        assert not operator.dense(None).any()
        assert not operator.apply(torch.randn(operator.shape).to(dtype)).any()
    check_everything(operator, 1e-12 if dtype == torch.float64 else FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_decay(dtype: torch.dtype) -> None:
    """With A = 0 every earlier token is remembered in full."""
    operator = SelectiveScan(
        torch.rand(2, 23, 3, dtype=dtype),
        torch.zeros(3, 2, dtype=dtype),
        torch.randn(2, 23, 2, dtype=dtype),
        torch.randn(2, 23, 2, dtype=dtype),
    )
    check_everything(operator, 1e-12 if dtype == torch.float64 else FLOAT32)


def test_mixed_extremes() -> None:
    """Steps from 0 to 1e3 and rates from 0 to 1e3 side by side."""
    dt = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 80.0, 1e3]).double()
    dt = dt[torch.randint(6, (2, 50, 4))]
    a = -torch.tensor([0.0, 1e-6, 1.0, 1e3]).double()[torch.randint(4, (4, 3))]
    check_everything(SelectiveScan(dt, a, randn(2, 50, 3), randn(2, 50, 3)), 1e-12)


def test_strictly_causal(make: Any) -> None:
    operator = make.scan(19).operator
    for matrix in (operator.dense(None), operator.dense()):
        assert not matrix.triu(1).any()


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("elements", [1, 200, 10**9])
def test_chunks_of_any_size(
    make: Any, monkeypatch: pytest.MonkeyPatch, tokens: int, elements: int
) -> None:
    monkeypatch.setattr(selective_scan, "_SCAN_ELEMENTS", elements)
    monkeypatch.setattr(selective_scan, "TREE_ELEMENTS", elements)
    case = make.scan(tokens)
    v = randn(3, *case.shape)
    assert relative_error(case.operator.apply(v), times(case.matrices, v)) <= 1e-12
    assert relative_error(case.operator.transpose(v), times(case.matrices.mT, v)) <= 1e-12
    assert relative_error(case.operator.dense(), case.matrices.mean(1)) <= 1e-12


def long_scan(tokens: int) -> tuple[list[Tensor], Tensor]:
    """dt, A, B and C that remember a long time, in float32, and the exact matrices."""
    dt = torch.exp(torch.empty(1, tokens, 3).uniform_(-7, -2))
    a = -torch.exp(torch.empty(3, 2).uniform_(-2, 1))
    b, c = torch.randn(1, tokens, 2), torch.randn(1, tokens, 2)
    time = dt.double().cumsum(1).transpose(1, 2)  # (1, 3, L)
    elapsed = (time[..., :, None] - time[..., None, :]).tril()
    alpha = torch.zeros_like(elapsed)
    for n in range(2):
        decay = torch.exp(elapsed * a[:, n, None, None].double())
        alpha += c[:, None, :, None, n].double() * decay * b[:, None, None, :, n].double()
    return [dt, a, b, c], (alpha * dt.double().transpose(1, 2)[:, :, None]).tril()


def test_float32_is_accurate_over_1024_tokens() -> None:
    coefficients, alpha = long_scan(1024)
    operator = SelectiveScan(*coefficients)
    assert operator.dtype == torch.float32
    assert relative_error(operator.dense(), alpha.mean(1)) <= FLOAT32
    assert relative_error(operator.rows([1023, 500], None), alpha[:, :, [1023, 500]]) <= FLOAT32
    v = torch.randn(operator.shape)
    assert relative_error(operator.apply(v), times(alpha, v)) <= FLOAT32
    assert relative_error(operator.transpose(v), times(alpha.mT, v)) <= FLOAT32
    x = torch.randn(1, 1024)
    mean = alpha.mean(1)
    assert relative_error(operator.mean_matvec(x), x.double() @ mean[0].T) <= FLOAT32
    assert relative_error(operator.mean_rmatvec(x), x.double() @ mean[0]) <= FLOAT32


def test_float32_chain_is_accurate_over_1024_tokens() -> None:
    coefficients, alpha = long_scan(1024)
    shape = Shape(1, 1024, 3, 1)
    gate, ratio, taps = torch.randn(shape), torch.rand(shape), torch.randn(3, 1, 4)
    chain = Chain(
        Diagonal(gate, shape),
        SelectiveScan(*coefficients),
        Diagonal(ratio, shape),
        ShortConv(taps, shape),
    )
    core = gate.double()[..., 0].mT[..., None] * alpha * ratio.double()[..., 0].mT[..., None, :]
    wanted = torch.zeros_like(core)
    for lag in range(4):  # column j of the product collects column j + lag
        weight = taps[:, :, lag, None].double()
        wanted[..., : 1024 - lag] += core[..., lag:] * weight
    assert relative_error(chain.dense(), wanted.mean(1)) <= FLOAT32
    assert relative_error(chain.rows([1000], None), wanted[:, :, [1000]]) <= FLOAT32
    assert relative_error(chain.contract(gate, ratio), contracted(gate, wanted, ratio)) <= FLOAT32


def contracted(left: Tensor, alpha: Tensor, right: Tensor) -> Tensor:
    left, right = left.double()[..., 0], right.double()[..., 0]
    return torch.einsum("bic,bcij,bjc->bij", left, alpha, right)
