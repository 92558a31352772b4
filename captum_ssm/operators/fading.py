"""What recurrences whose states fade independently of each other have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import pivot
from .band import Band
from .maps import full_precision
from .recurrent import Recurrent
from .semiseparable import BandFactors, semiseparable_strip
from .strips import Strip
from .underflow import underflow_flushed

#: Elements of one factor of a block of the matrix tree (1 MiB in float32), and the fewest of its
#: channels times states: products of fewer are slow.
TREE_ELEMENTS = 2**18
TREE_LEAST = 128
#: Lags from first to last up to which a band stays in the tree.
TREE_LAGS = 16


class FadingRecurrence(Recurrent, pivot.Fading):
    """Base of recurrences of which rows are found by a tree of pivots, or cut at one."""

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        tokens = self.shape.tokens
        return self.strip(left, right, range(tokens)).whole(tokens)

    def strip(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        return self.strip_of_product(left, {0: right}, rows)

    def strip_of_product(self, left: Tensor, band: Band, rows: range) -> Strip:
        first, last = min(band), max(band)
        if last - first >= TREE_LAGS:
            return Recurrent.strip_of_product(self, left, band, rows)
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            # what is cut off must be more than the band reaches back
            if rows.start >= pivot.LEAST + max(last, last - first):
                return pivot.strip_by_pivot(self, left, band, rows)
            factors = self._tree_blocks(left, band, rows)
            own = self._own_share(left, band[first], slice(rows.start, rows.stop))
            batch, tokens, *_ = self.shape
            return semiseparable_strip(factors, batch, tokens, rows, first, own)

    def _tree_blocks(self, left: Tensor, band: Band, rows: range) -> Iterator[BandFactors]:
        """Factors of the tree, some channels and states at a time."""
        raise NotImplementedError

    def _own_share(self, left: Tensor, right: Tensor, rows: slice) -> Tensor:
        """What tokens read of what they write themselves, summed over channels, (B, R)."""
        every, (batch, tokens, heads, _) = slice(None), self.shape
        read = (self.queries(rows, every) * self.keys(rows, every)).sum(2)  # (B, R, 1 or H)
        row = left.expand(batch, tokens, -1, -1)[:, rows, :, 0]  # (B, R, 1 or H)
        # what is common to all channels is not repeated: loops are slow over such operands
        sent = self.written(right[..., 0]).expand(batch, tokens, heads)[:, rows]
        apart = [factor for factor in (row, read) if factor.shape[-1] > 1]
        own: Tensor = torch.linalg.vecdot(math.prod(apart), sent) if apart else sent.sum(-1)
        for factor in (row, read):
            if factor.shape[-1] == 1:
                own = own * factor[..., 0]
        return own
