"""The package's own kernel: the convolution in one launch is the matrix of its taps."""

from __future__ import annotations

import pytest
import torch
from oracles import kernels as naive
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators.kernels import fused_taps

#: Rows, tokens, channels and taps; of tokens and channels the last block is not whole.
SIZES = [(1, 1, 3, 4), (3, 3, 5, 4), (1, 17, 7, 1), (2, 65, 66, 3), (1, 127, 1, 16)]


def by_matrices(weight: Tensor, x: Tensor, transposed: bool) -> Tensor:
    band = {lag: taps[None, None, :, None] for lag, taps in enumerate(weight.double().T)}
    matrices = naive.band_matrix(band, x.shape[1])[:, :, 0]  # (1, C, L, L)
    found = (matrices.mT if transposed else matrices) @ x.double().mT[..., None]
    return found[..., 0].mT


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_convolutions(size: tuple[int, int, int, int], transposed: bool) -> None:
    rows, tokens, channels, taps = size
    weight, x = torch.randn(taps, channels).T, torch.randn(rows, tokens, 2 * channels)
    x = x[..., ::2]
    found = fused_taps.run(weight, x, transposed=transposed)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert relative_error(found, by_matrices(weight, x, transposed)) <= 1e-6


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_other_precisions(dtype: torch.dtype, bound: float, transposed: bool) -> None:
    """Float64 is kept, and half precision computed in float32: only what comes out is rounded."""
    weight = torch.randn(3, 4, dtype=torch.promote_types(dtype, torch.float32))
    x = torch.randn(1, 9, 3).to(dtype)
    found = fused_taps.run(weight, x, transposed=transposed)
    assert found.dtype == dtype
    assert relative_error(found.double(), by_matrices(weight, x, transposed)) <= bound


def test_what_is_repeated_is_not_copied() -> None:
    weight, x = torch.randn(4, 3), torch.randn(2, 9, 1).expand(2, 9, 4)
    found = fused_taps.run(weight, x, transposed=True)
    assert relative_error(found, by_matrices(weight, x, True)) <= 1e-6
