"""Inverses of many small triangular matrices.

Libraries invert a triangular matrix row by row, which for small ones takes several times as long as
the same number of multiplications in products of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Sides up to which rows are as quick as products.
_ROWS = 8


def inverse(x: Tensor) -> Tensor:
    """The inverses of matrices (..., T, T) of ones on the diagonal and zeros above it.

    What ``x`` holds there is not read.

    Args:
        x: what is below the diagonal.
    """
    half, odd = divmod(x.shape[-1], 2)
    if odd or half * 2 <= _ROWS:
        one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
        found: Tensor = torch.linalg.solve_triangular(x, one, upper=False, unitriangular=True)
        return found
    out = torch.zeros_like(x)
    first, second = slice(half), slice(half, None)
    above, below = inverse(torch.stack([x[..., s, s] for s in (first, second)])).unbind()
    out[..., first, first], out[..., second, second] = above, below
    out[..., second, first] = (below @ x[..., second, first] @ above).neg_()
    return out
