"""Banded matrices over tokens: a few lags, each with a factor per token and channel.

A band maps x to y[t] = sum over lags k of band[k][t] x[t - k]; tokens beyond the ends are zero.
It is stored by its diagonals (band storage; Golub and Van Loan, Matrix Computations, 4th ed., 2013,
section 1.2).  The product of two bands of K and M lags takes K M products of vectors.  The naive
version forms the matrices.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

#: Factors of a banded matrix by lag, each broadcastable to (B, L, H, P).
Band = dict[int, Tensor]


def shift_tokens(x: Tensor, lag: int) -> Tensor:
    """Return y[t] = x[t - lag] along the tokens of ``x`` (..., L, H, P), with zeros at the ends."""
    tokens = x.shape[-3]
    if lag == 0:
        return x
    lag = max(-tokens, min(tokens, lag))  # larger lags leave only zeros
    inside = x[..., : tokens - lag, :, :] if lag > 0 else x[..., -lag:, :, :]
    padding = (lag, 0) if lag > 0 else (0, -lag)
    return F.pad(inside, (0, 0, 0, 0, *padding))


def lags_of(band: Band) -> range:
    """Return all lags from a band's smallest lag to its largest."""
    return range(min(band), max(band) + 1)


def overlap(tokens: int, lag: int) -> tuple[slice, slice]:
    """Return slices of all t - lag and of all t for which both are in 0 .. tokens - 1."""
    count = max(0, tokens - abs(lag))
    first = max(0, -lag)
    return slice(first, first + count), slice(first + lag, first + lag + count)


def convolve_band(taps: dict[int, Tensor], band: Band, tokens: int) -> Band:
    """Return convolution . band as a band; ``taps`` are the convolution's weights by lag."""
    out: Band = {}
    for lag, weight in taps.items():
        for inner_lag, factor in band.items():
            size = (factor.shape[0], tokens, *factor.shape[2:])
            term = weight * shift_tokens(factor.expand(size), lag)
            out[lag + inner_lag] = out[lag + inner_lag] + term if lag + inner_lag in out else term
    return out
