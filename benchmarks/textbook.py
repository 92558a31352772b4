"""The obvious way: the implicit attention matrix entry by entry, the rollout as matrix products.

This is the reference the fast operators are timed against: two nested loops over tokens, the
product of decays carried along, every channel and state at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.operators import SelectiveScan


def mean_matrix(scan: SelectiveScan) -> Tensor:
    """The channel mean of the scan's matrices, (B, L, L) (hidden-attention paper, eq. 14)."""
    batch, tokens, _, _ = scan.shape
    decays = torch.exp(scan.dt[..., None] * scan.a)  # (B, L, D, N)
    out = torch.zeros(batch, tokens, tokens, dtype=scan.dt.dtype)
    for i in range(tokens):
        product = torch.ones_like(decays[:, 0])
        for j in range(i, -1, -1):
            written = scan.dt[:, j, :, None] * scan.b[:, j, None, :]
            entry = (scan.c[:, i, None, :] * product * written).sum(-1)
            out[:, i, j] = entry.mean(-1)
            product = product * decays[:, j]
    return out


def rollout_row(scans: list[SelectiveScan]) -> Tensor:
    """The last row of the product over layers of I + mean matrix, (B, L) (eqs. 21-22)."""
    identity = torch.eye(scans[0].shape.tokens)
    product = identity.expand(scans[0].shape.batch, -1, -1)
    for scan in scans:
        product = (identity + mean_matrix(scan)) @ product
    return product[:, -1]
