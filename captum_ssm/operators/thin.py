"""Products of many matrices with a few columns each.

Libraries for processors multiply a stack of matrices by a few rows at the speed of memory, and by a
few columns several times slower, up to twenty times where the matrices are transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: From so many columns on both take as long.
_THIN = 16


def times(matrices: Tensor, values: Tensor) -> Tensor:
    """Matrices (..., T, N) times as many (..., N, P); as rows where they are few columns."""
    # matmul ends in bmm, and what it does before that takes as long as products with few columns
    alike = matrices.dim() == 3 and matrices.shape[:-2] == values.shape[:-2]
    product = torch.bmm if alike else torch.matmul
    if values.shape[-1] < _THIN:
        return product(values.mT, matrices.mT).mT.contiguous()
    return product(matrices, values)
