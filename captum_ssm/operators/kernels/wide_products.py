"""Products of float32 vectors with bfloat16 weights, in float32 and without a copy of the weight.

    y = W x = W high + W low,   high = bfloat16(x),   low = bfloat16(x - high)

Tensor cores multiply numbers of bfloat16 and add the products up in float32.  A float32 number is
nearly the sum of two numbers of bfloat16: 16 of its 24 bits are kept.

:takes: x (..., K) in float32, and W (N, K) in bfloat16.
:gives: y (..., N) in float32.
:cost: two products in half precision.
:literature: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For
    Higher-Precision Computations, 2019.
:naive version: ``kernels.product``
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from .arithmetic import full_precision


def serves(x: Tensor, weight: Tensor) -> bool:
    """Return True if a GPU multiplies ``x`` by a weight in bfloat16 (torch 2.8 or later)."""
    is_half = type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.bfloat16
    is_there = x.is_cuda and weight.device == x.device and torch.version.hip is None
    return is_half and is_there and x.dtype == torch.float32 and hasattr(torch.ops.aten.mm, "dtype")


@wrap_torch_function(lambda x, weight, bias=None: (x, weight, bias))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W x + bias; torch's function modes see the call as they see torch's own ``linear``.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N,). Default: None, no bias.
    """
    out: Tensor = _Product.apply(x, weight.T)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _Product(torch.autograd.Function):
    """Values (..., K) times a matrix (K, N), which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix)
        rows = x.reshape(-1, x.shape[-1])
        with full_precision(x.device):
            high = rows.bfloat16()
            low = (rows - high).bfloat16()
            out = multiply(high, matrix).add_(multiply(low, matrix))
        return out.view(*x.shape[:-1], matrix.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        return _Product.apply(grads[0], matrix.T), None  # type: ignore[no-untyped-call]


def multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """(R, K) times (K, N), both in bfloat16, in float32 (R, N)."""
    return torch.mm(rows, matrix, out_dtype=torch.float32)
