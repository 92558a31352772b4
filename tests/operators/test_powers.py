"""Exponentials of decays, as powers of two."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.operators.kernels.arithmetic import exponential, exponential_


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_exact_as_the_exponent_allows(dtype: torch.dtype) -> None:
    x = -80 * torch.rand(3, 1001, dtype=dtype) ** 3
    wanted = x.double().exp()
    error = (exponential(x).double() - wanted).abs() / wanted
    # one rounding of the exponent, and one of the power
    assert bool((error <= (1 - 2 * x.double()) * torch.finfo(dtype).eps).all())


def test_the_ends() -> None:
    x = torch.tensor([0.0, -0.0, -1e30, -torch.inf])
    assert torch.equal(exponential(x), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert exponential(torch.tensor([torch.nan])).isnan().all()


def test_in_place() -> None:
    x = -torch.rand(5, 7).T
    wanted = exponential(x)
    assert exponential_(x) is x and torch.equal(x, wanted)
