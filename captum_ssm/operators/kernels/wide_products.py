"""Products of float32 vectors with half-precision weights; no float32 copy of a weight stays.

On a GPU, products with bfloat16 weights need no float32 copy at all:

    y = W x = W high + W low,   high = bfloat16(x),   low = bfloat16(x - high)

Tensor cores multiply bfloat16 numbers and sum the products in float32.  The sum of two bfloat16
numbers approximates a float32 number with 16 of its 24 bits.  Elsewhere, and with float16 weights,
the weight is copied for each product, forward and backward.

:takes: x (..., K) in float32, and W (N, K) in bfloat16 or float16.
:gives: y (..., N) in float32.
:cost: two products in half precision, or a copy and a product in float32.
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

_HALF = (torch.bfloat16, torch.float16)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Return True for ``x`` in float32 and a plain weight in half precision on the same device."""
    is_half = type(weight) in (Tensor, nn.Parameter) and weight.dtype in _HALF
    return is_half and weight.device == x.device and x.dtype == torch.float32


def _needs_no_copy(weight: Tensor) -> bool:
    """Return True on a GPU for bfloat16 weights; it needs torch 2.8."""
    on_nvidia = weight.is_cuda and torch.version.hip is None
    return on_nvidia and weight.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype")


@wrap_torch_function(lambda x, weight, bias=None: (x, weight, bias))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W x + bias (..., N); torch's function modes can intercept this call.

    Args:
        x: vectors (..., K) in float32.
        weight: the matrix W (N, K) in half precision.
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
            if _needs_no_copy(matrix):
                high = rows.bfloat16()
                low = (rows - high).bfloat16()
                out = multiply(high, matrix).add_(multiply(low, matrix))
            else:
                out = rows @ matrix.to(rows)
        return out.view(*x.shape[:-1], matrix.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        return _Product.apply(grads[0], matrix.T), None  # type: ignore[no-untyped-call]


def multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply bfloat16 matrices (R, K) and (K, N); return the product (R, N) in float32."""
    return torch.mm(rows, matrix, out_dtype=torch.float32)
