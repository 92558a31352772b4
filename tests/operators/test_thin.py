"""Thin products are products."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.operators.kernels.arithmetic import matmul


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 33])
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_the_product(columns: int, transposed: bool) -> None:
    matrices = torch.randn(2, 1, 3, 7, 5, dtype=torch.float64)
    if transposed:
        matrices = matrices.mT.contiguous().mT
    values = torch.randn(1, 4, 3, 5, columns, dtype=torch.float64)
    found = matmul(matrices, values)
    assert found.shape == (2, 4, 3, 7, columns)
    wanted = (matrices[..., None] * values[..., None, :, :]).sum(-2)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_nothing_is_left_of_empty_ones() -> None:
    assert matmul(torch.ones(2, 3, 0), torch.ones(2, 0, 1)).tolist() == [[[0.0]] * 3] * 2
    assert matmul(torch.ones(2, 0, 3), torch.ones(2, 3, 1)).shape == (2, 0, 1)
