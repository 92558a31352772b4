"""The obvious ways: what the fast operators are timed against, and held to.

Entry by entry as in the paper and in published code, each with a product of decays of its own, one
factor after the other, every channel and state at once; and every entry's decay as one exponential
of a sum of steps.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from captum_ssm.operators import Operator, SelectiveScan

#: Elements of the exponentials formed at a time (256 MiB in float32).
_ELEMENTS = 2**26


def mean_matrix(scan: SelectiveScan) -> Tensor:
    """The channel mean of the scan's matrices, (B, L, L) (hidden-attention paper, eq. 14)."""
    batch, tokens, _, _ = scan.shape
    decays = torch.exp(scan.dt[..., None] * scan.a)  # (B, L, D, N)
    out = scan.dt.new_zeros(batch, tokens, tokens)
    for i in range(tokens):
        for j in range(i + 1):
            product = torch.ones_like(decays[:, 0])
            for k in range(j + 1, i + 1):
                product = product * decays[:, k]
            written = scan.dt[:, j, :, None] * scan.b[:, j, None, :]
            out[:, i, j] = (scan.c[:, i, None, :] * product * written).sum(-1).mean(-1)
    return out


def by_exponentials(scan: SelectiveScan) -> Tensor:
    """The same, from exp(A times the sum of steps over j+1..i) for every entry."""
    batch, tokens, heads, _ = scan.shape
    sums = scan.dt.cumsum(1)
    state = scan.a.shape[-1]
    size = max(1, _ELEMENTS // (batch * tokens * heads * state))
    out = scan.dt.new_zeros(batch, tokens, tokens)
    for start in range(0, tokens, size):
        rows = slice(start, start + size)
        since = (sums[:, rows, None] - sums[:, None]).clamp_min(0)  # (B, r, L, D)
        decays = torch.exp(since[..., None] * scan.a)
        written = scan.dt[..., None] * scan.b[:, :, None]  # (B, L, D, N)
        read = scan.c[:, rows, None, None, :]
        out[:, rows] = (read * decays * written[:, None]).sum(-1).mean(-1)
    return out.tril()


def in_float64(operator: Operator) -> Operator:
    """A copy of the operator with the same coefficients in float64."""
    twin = copy.copy(operator)
    for name, value in vars(operator).items():
        setattr(twin, name, _widened(value))
    return twin


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Operator):
        return in_float64(value)
    if isinstance(value, tuple) and value and all(isinstance(x, Operator) for x in value):
        return tuple(map(in_float64, value))
    return value
