"""The package's own kernel: the scan in one launch is the scan in torch, at awkward sizes."""

from __future__ import annotations

import pytest
import torch
from helpers.marks import slow_but
from oracles import kernels as naive
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import SelectiveScan
from captum_ssm.operators.kernels import fused_scan

#: Examples, tokens, channels, states and groups; of tokens and columns the last run is not whole.
SIZES = [
    (1, 1, 3, 16, None),
    (3, 3, 5, 16, None),
    (1, 17, 7, 3, None),
    (2, 33, 6, 5, 3),
    (1, 65, 5, 16, 1),
    (3, 127, 3, 2, None),
    (1, 5, 1, 64, None),
    (1, 9, 130, 1, None),
]


def scan_of(
    batch: int, tokens: int, heads: int, states: int, groups: int | None, dtype: torch.dtype
) -> SelectiveScan:
    """Steps and rates from hardly any to all of the state forgotten; laid out as views."""
    dt = (torch.rand(batch, heads, tokens).mT * 3).square()
    a = -torch.logspace(-3, 1, states).expand(heads, states) * torch.rand(heads, 1)
    shared = (batch, tokens) if groups is None else (batch, tokens, groups)
    b, c = torch.randn(*shared, 2 * states).chunk(2, -1)
    return SelectiveScan(*(x.to(dtype) for x in (dt, a, b, c)))


def fused(scan: SelectiveScan, x: Tensor, transposed: bool) -> Tensor:
    return fused_scan.run(scan.dt, scan.a, scan.b, scan.c, x[..., 0], transposed=transposed)


def by_matrices(scan: SelectiveScan, x: Tensor, transposed: bool) -> Tensor:
    """In float64 (S, B, L, H)."""
    matrices = naive.selective_scan(*(y.double() for y in (scan.dt, scan.a, scan.b, scan.c)))
    rows = x[..., 0].double().transpose(2, 3)[..., None]  # (S, B, H, L, 1)
    found = (matrices.mT if transposed else matrices) @ rows
    return found[..., 0].transpose(2, 3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", slow_but(SIZES[:2], SIZES))
def test_scans(size: tuple[int, int, int, int, int | None], transposed: bool) -> None:
    scan = scan_of(*size, torch.float32)
    x = torch.randn(2, *scan.shape)
    found, wanted = fused(scan, x, transposed), by_matrices(scan, x, transposed)
    assert found.dtype == torch.float32
    assert relative_error(found, wanted) <= 1e-6
    in_torch = scan._run(x, transposed)[..., 0]
    assert relative_error(found, in_torch) <= 1e-6


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype, transposed: bool) -> None:
    """Float64 is kept, and half precision computed in float32: only what comes out is rounded."""
    scan = scan_of(1, 17, 3, 4, None, torch.float64 if dtype == torch.float64 else torch.float32)
    x = torch.randn(1, *scan.shape).to(dtype)
    found, wanted = fused(scan, x, transposed), by_matrices(scan, x, transposed)
    assert found.dtype == dtype
    bound = {torch.float64: 1e-14, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert relative_error(found.double(), wanted) <= bound


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_repeated_is_not_copied(transposed: bool) -> None:
    """Vectors common to all channels, or to all examples."""
    scan = scan_of(2, 9, 4, 3, None, torch.float32)
    for x in (torch.randn(1, 2, 9, 1, 1), torch.randn(1, 1, 9, 4, 1)):
        spread = x.expand(1, *scan.shape)
        found = fused(scan, spread, transposed)
        assert relative_error(found, by_matrices(scan, spread, transposed)) <= 1e-6


#: The same for gradients, for which the interpreter takes longer: of one run of tokens and several,
#: of channels that one program takes and two.
SMALL = [
    (1, 1, 3, 16, None),
    (2, 17, 3, 3, None),
    (1, 33, 4, 5, 2),
    (1, 17, 1, 64, None),
    (1, 5, 18, 16, 1),
    (1, 60, 3, 2, None),
]


@pytest.mark.parametrize("size", slow_but(SMALL[:2], SMALL))
def test_gradients(size: tuple[int, int, int, int, int | None]) -> None:
    """Of two vectors, each with a B and a C of its own."""
    scan = scan_of(*size, torch.float32)
    x, up = torch.randn(2, 2, *scan.shape)
    own = {"B": scan.b, "C": scan.c}
    moved = {name: torch.randn(2, *shared.shape) for name, shared in own.items()}
    out, pull = scan._vjp_on_gpu(x, moved)
    of_x, found = pull(up)
    given = {"dt": scan.dt, "x": x[..., 0], **moved}
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    each = zip(exact["B"], exact["C"], exact["x"], strict=True)
    wanted = torch.stack([
        (naive.selective_scan(exact["dt"], scan.a.double(), b, c) @ v.mT[..., None])[..., 0].mT
        for b, c, v in each
    ])  # fmt: skip
    assert relative_error(out[..., 0], wanted) <= 1e-6
    gradients = torch.autograd.grad(wanted, list(exact.values()), up[..., 0].double())
    right = dict(zip(exact, gradients, strict=True))
    assert relative_error(of_x[..., 0], right.pop("x")) <= 1e-6
    assert relative_error(found.pop("dt"), right.pop("dt")) <= 1e-6
    for name, of in found.items():
        assert of.shape == own[name].shape
        assert relative_error(of, right[name].sum(0)) <= 1e-6, name


def test_gradients_of_half_precision() -> None:
    """Computed in float32: only what comes out is rounded, and of values alone."""
    scan = scan_of(1, 17, 3, 4, None, torch.float32)
    x, up = torch.randn(2, 1, *scan.shape).bfloat16()
    of_x, found = scan._vjp_on_gpu(x, {})[1](up)
    of_wide, exact = scan._vjp_on_gpu(x.float(), {})[1](up.float())
    assert of_x.dtype == torch.bfloat16 and found["B"].dtype == torch.float32
    assert relative_error(of_x, of_wide) <= 2**-8
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_nan_is_kept() -> None:
    """It goes on to later tokens of its channel, and to no other channel."""
    scan = scan_of(1, 6, 3, 2, None, torch.float32)
    x = torch.randn(1, *scan.shape)
    x[0, 0, 2, 1] = torch.nan
    found = fused(scan, x, False).isnan()[0, 0]
    assert found[2:, 1].all() and found.sum() == 4
