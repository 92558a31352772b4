"""Products of decays between tokens.

No product is a quotient of others, and none a difference of sums of logarithms: each is built up
from factors that are at most one.  A decay of zero is one like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Decays:
    """Products of the decays of runs of T tokens.

    Attributes:
        between: those after j up to i in row i and column j, (..., T, T); any numbers of at most 1
            where j comes after i.  Rows share memory: not to be written to.
        since: those from the first token to each, inclusive, (..., T, 1).
        until: those after each token, (..., T, 1).
        total: all of them, (..., 1, 1).

    Args:
        decay: the decays (..., T), at most 1.
    """

    def __init__(self, decay: Tensor) -> None:
        self.between = _between(decay)
        self.since = self.between[..., :1] * decay[..., :1, None]
        self.until = self.between[..., -1, :, None]
        self.total = self.since[..., -1:, :]


def _between(decay: Tensor) -> Tensor:
    """Products of the decays (..., T) after j up to i, as :class:`Decays` has them.

    Those of twice as many factors are products of two that are known, so that few steps do.
    """
    tokens = decay.shape[-1]
    last = tokens - 1
    # row i, from right to left: the products of the last 0, 1, 2, ... decays up to i
    products = decay.new_zeros(*decay.shape, tokens)
    products[..., last] = 1
    products[..., 1:, last - 1 : last] = decay[..., 1:, None]
    known = 1
    while known < last:
        more = min(known, last - known)
        end = last - known
        torch.mul(
            products[..., known:, end : end + 1],
            products[..., :-known, last - more : last],
            out=products[..., known:, end - more : end],
        )
        known += more
    # each row moved to the left by as many places as it is from the last
    rows = *products.stride()[:-2], max(1, last), 1
    return products.as_strided(products.shape, rows, last)
