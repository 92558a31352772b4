"""Products of float32 vectors with bfloat16 weights, without a float32 copy of the weights.

    y = W x = W high + W low,   high = bfloat16(x),   low = bfloat16(x - high)

Tensor cores multiply bfloat16 numbers and sum the products in float32.  The sum of two bfloat16
numbers approximates a float32 number with 16 of its 24 bits.

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
    """Return True if this kernel supports ``x`` and ``weight``; it needs a GPU and torch 2.8."""
    is_half = type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.bfloat16
    is_there = x.is_cuda and weight.device == x.device and torch.version.hip is None
    return is_half and is_there and x.dtype == torch.float32 and hasattr(torch.ops.aten.mm, "dtype")


@wrap_torch_function(lambda x, weight, bias=None: (x, weight, bias))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W x + bias (..., N); torch's function modes can intercept this call.

    Args:
        x: vectors (..., K) in float32.
        weight: the matrix W (N, K) in bfloat16.
        bias: vector to add (N,). Default: None, no bias.
    """
    out: Tensor = _Product.apply(x, weight.T)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _Product(torch.autograd.Function):
    """Autograd function: values (..., K) times a matrix (K, N) that gets no gradient."""

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
    """Multiply bfloat16 matrices (R, K) and (K, N); return the product (R, N) in float32."""
    return torch.mm(rows, matrix, out_dtype=torch.float32)
