"""The package's own kernel: one launch gives what the matrices give, at awkward sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.marks import slow_but
from oracles import kernels as naive
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import SelectiveScan
from captum_ssm.operators.kernels import fused_scan


def steps(
    batch: int, tokens: int, heads: int, states: int, groups: int | None
) -> dict[str, Tensor]:
    """Steps and rates from hardly any to all of the state forgotten; all laid out as views."""
    dt = (torch.rand(batch, heads, tokens).mT * 3).square()
    a = -torch.logspace(-3, 1, states).expand(heads, states) * torch.rand(heads, 1)
    shared = (batch, tokens) if groups is None else (batch, tokens, groups)
    b, c = torch.randn(*shared, 2 * states).chunk(2, -1)
    return {"dt": dt, "a": a, "b": b, "c": c}


def check(given: dict[str, Tensor], x: Tensor, bound: float = 3e-6) -> None:
    """Compare the map and its adjoint of x (S, B, L, H) with float64 matrices."""
    matrices = naive.selective_scan(**{name: t.double() for name, t in given.items()})
    for transposed in (False, True):
        found = fused_scan.run(*given.values(), x, transposed=transposed)
        assert found.dtype == x.dtype and found.is_contiguous()
        alpha = (matrices.mT if transposed else matrices).expand(len(x[0]), -1, -1, -1)
        wanted = torch.einsum("bhij,sbjh->sbih", alpha, x.double())
        assert relative_error(found, wanted) <= bound


#: Of tokens, states and channels the last block is not whole.
SIZES = [
    (1, 1, 3, 16, None), (3, 3, 5, 16, None), (1, 17, 7, 3, None), (2, 33, 6, 5, 3),
    (1, 65, 5, 16, 1), (3, 127, 3, 2, None), (1, 5, 1, 64, None), (1, 9, 130, 1, None),
]  # fmt: skip


@pytest.mark.parametrize("size", slow_but(SIZES[:2], SIZES))
def test_awkward_sizes(size: tuple[int, int, int, int, int | None]) -> None:
    """Of two vectors, of which channels are every other number."""
    check(steps(*size), torch.randn(2, *size[:2], 2 * size[2])[..., ::2])


BOUNDS = {torch.float64: 1e-14, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_other_precisions(dtype: torch.dtype) -> None:
    """Float64 is kept, and half precision computed in float32: only what comes out is rounded."""
    given: dict[str, Any] = steps(1, 17, 3, 4, None)
    if dtype == torch.float64:
        given = {name: t.double() for name, t in given.items()}
    check(given, torch.randn(1, 1, 17, 3).to(dtype), BOUNDS[dtype])


def test_what_is_repeated_is_not_copied() -> None:
    """Vectors common to all channels, or to all examples."""
    given = steps(2, 9, 4, 3, None)
    for x in (torch.randn(1, 2, 9, 1), torch.randn(1, 1, 9, 4)):
        check(given, x.expand(1, 2, 9, 4))


# --- the scan's gradients, and states of chunks --------------------------------------------------

#: For gradients the interpreter takes longer: of one run of tokens and several, of channels that
#: one program takes and two.
OF_GRADIENTS = [
    (1, 1, 3, 16, None), (2, 17, 3, 3, None), (1, 33, 4, 5, 2), (1, 17, 1, 64, None),
    (1, 5, 18, 16, 1), (1, 60, 3, 2, None),
]  # fmt: skip


@pytest.mark.parametrize("size", slow_but(OF_GRADIENTS[:2], OF_GRADIENTS))
def test_gradients(size: tuple[int, int, int, int, int | None]) -> None:
    """Of two vectors, each with a B and a C of its own."""
    scan = SelectiveScan(*steps(*size).values())
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
    scan = SelectiveScan(*steps(1, 17, 3, 4, None).values())
    x, up = torch.randn(2, 1, *scan.shape).bfloat16()
    of_x, found = scan._vjp_on_gpu(x, {})[1](up)
    of_wide, exact = scan._vjp_on_gpu(x.float(), {})[1](up.float())
    assert of_x.dtype == torch.bfloat16 and found["B"].dtype == torch.float32
    assert relative_error(of_x, of_wide) <= 2**-8
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_nan_is_kept() -> None:
    """It goes on to later tokens of its channel, and to no other channel."""
    x = torch.randn(1, 1, 6, 3, 1)
    x[0, 0, 2, 1] = torch.nan
    given = steps(1, 6, 3, 2, None).values()
    found = fused_scan.run(*given, x[..., 0], transposed=False)[0, 0].isnan()
    assert found[2:, 1].all() and found.sum() == 4
