"""Copies between tensors whose channels lie side by side in memory and those whose tokens do.

torch copies strided tensors number by number, which takes ten times as long as to copy runs of
them and to transpose whole matrices, for which it has a way of its own.
"""

from __future__ import annotations

from torch import Tensor


def time_first(x: Tensor) -> Tensor:
    """A tensor (T, B, D) with its channels side by side: itself, or a copy."""
    return x if x.is_contiguous() else copied(x, x.new_empty(x.shape))


def copied(x: Tensor, out: Tensor) -> Tensor:
    """Copy a tensor (T, B, D) to another, whatever lies side by side in either."""
    if x.stride(0) == 1 and out.stride(2) == 1:
        for one, into in zip(x.unbind(1), out.unbind(1), strict=True):
            into.copy_(_by_rows(one))
    elif x.stride(2) == 1 and out.stride(0) == 1:
        for one, into in zip(x.unbind(1), out.unbind(1), strict=True):
            into.T.copy_(_by_rows(one.T))
    else:
        out.copy_(x)
    return out


def _by_rows(x: Tensor) -> Tensor:
    """A matrix whose columns are runs of memory as one that is a single run, row by row."""
    return x.T.contiguous().T.contiguous()
