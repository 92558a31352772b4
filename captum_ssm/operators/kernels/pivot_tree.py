"""Sums of semiseparable matrices, assembled from low-rank blocks by a binary tree of pivots.

The lower-triangular matrix

    M[i, j] = sum over k of U[i, k] (product of A[t, k] over j < t <= i) V[j, k]

is the map of every diagonal recurrence.  Each block of tokens is split at a pivot: rows after the
pivot and columns before it form a tile that is one matrix product.  Its factors contain only
products of decays within the block.  There is no quotient of decays and no exponential of a
difference of cumulative sums, hence no overflow and no cancellation.

The tree begins with blocks of one token and joins neighboring blocks; the last block may be shorter
or have no neighbor, so no length needs padding.  A block is *forgotten* if the product of its
decays is below rounding.  If all channels forget every block of some length, tiles of larger blocks
need only that many tokens on either side of the pivot.

A banded matrix on the right is included in the tree.  With factors V[lag] that token t receives
from token t - lag, lags first .. last, token j + last completes the writing of token j, which then
decays like any state.  Column j of the product is column j + last of a semiseparable matrix, whose
factors are a few steps of the recurrence.  The few entries before that are single products.

:takes: blocks of K channels: decays A (B, L, K) between 0 and 1, row factors U (B, R, K), and for
    each lag column factors V (B, L, K).
:gives: R neighboring rows of the sum over all channels (B, R, W).
:cost: L^2 K / 2 multiplications with additions, as products of matrices, or w L K where channels
    forget within w tokens; L K log L for scaling the factors.
:literature: Vandebril, Van Barel and Mastronardi, Matrix Computations and Semiseparable Matrices,
    volume 1, 2008, for such matrices and their generators; Hackbusch, A Sparse Matrix Arithmetic
    Based on H-Matrices, 1999, for assembly by blocks of low rank.
:naive version: ``kernels.banded_semiseparable``
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import Scratch
from .rows import Strip
from .truths import are_noted

#: Decays A, row factors U, and column factors V for each of some neighboring lags, ascending.
BandFactors = tuple[Tensor, Tensor, Sequence[Tensor]]
#: Number of tokens of the blocks that :meth:`_Sum.add` checks for being forgotten.
_PROBED = 64
#: Smallest number of tokens for which reading this check from a GPU saves time.
_LONG = 4096


def semiseparable_strip(
    blocks: Iterable[BandFactors],
    batch: int,
    tokens: int,
    rows: range,
    first_lag: int = 0,
) -> Strip:
    """Return rows of M times a banded matrix, summed over all blocks of channels.

    The tree covers all tokens up to the last row; :mod:`.pivot_strip` costs less for strips that
    begin far from the first token.

    Args:
        blocks: yields for each block of channels the decays and column factors of the tokens up to
            the last row, and the row factors of the rows. The tensors are overwritten. All blocks
            have the same number of lags.
        batch: number of examples, B.
        tokens: number of tokens, L.
        rows: neighboring rows, ascending; at least one.
        first_lag: lag of the first column factors. Default: 0.
    """
    total: _Sum | None = None
    for decay, u, columns in blocks:
        if total is None:
            total = _Sum(decay, batch, rows, len(columns))
        total.add(decay, u, columns)
    if total is None:
        raise ValueError("blocks is empty. Pass at least one block of factors (decays, U, V).")
    out = total.assembled()[:, rows.start :]
    last_lag = first_lag + len(total.diagonals) - 1
    return Strip(out, rows, range(out.shape[-1])).moved(0, -last_lag, tokens)


class _Sum:
    """The sum over the blocks added so far, whose column j + last lag is the product's column j.

    Attributes:
        rows: indices of the rows; entries of all earlier rows are zero.
        levels: the tiles below the diagonals, for each level of the tree.
        diagonals: for every lag, entry (i, i - lag) of each row i, (lags, B, R).
    """

    def __init__(self, like: Tensor, batch: int, rows: range, lags: int) -> None:
        self.rows = rows
        depth = (rows.stop - 1).bit_length()
        self.levels = [_Level(like, batch, rows.stop, 2**i) for i in range(depth)]
        self.diagonals = like.new_zeros(lags, batch, rows.stop)
        self._scratch = Scratch(like)

    def add(self, decay: Tensor, u: Tensor, columns: Sequence[Tensor]) -> None:
        """Add a block of channels; the tensors are overwritten."""
        decay, u = decay.contiguous(), self._from_first_token(u.contiguous())
        columns = [column.contiguous() for column in columns]
        products = self._scratch("products", *u.shape)
        for lag, column in enumerate(columns):
            if lag:
                column[:, 1:].addcmul_(decay[:, 1:], columns[lag - 1][:, :-1])
            self.diagonals[lag] += torch.mul(u, column, out=products).sum(-1)
        u *= decay
        window, near = math.inf, self.rows.stop
        for level in self.levels:
            span = level.span
            if span == _PROBED and (self.rows.stop >= _LONG or not are_noted(decay)):
                window = _window(decay[:, : self.rows.stop // span * span : span], span)
            if span >= window:  # entries of tokens further from a pivot are below rounding
                near = min(near, span)
            level.add(decay, u, columns[-1], window=min(span, near))

    def _from_first_token(self, u: Tensor) -> Tensor:
        """Pad row factors (B, R, K) with zeros for the tokens before the rows, (B, L, K)."""
        if not self.rows.start:
            return u
        out = self._scratch("rows", len(u), self.rows.stop, u.shape[-1])
        out[:, : self.rows.start] = 0
        out[:, self.rows.start :] = u
        return out

    def assembled(self) -> Tensor:
        """Return the sum as one matrix, from the tiles and the diagonals."""
        lags, batch, height = self.diagonals.shape
        out = self.diagonals.new_zeros(batch, height, height + lags - 1)
        for level in self.levels:
            level.write(out)
        for offset, diagonal in enumerate(self.diagonals.flip(0)):
            out.diagonal(offset, 1, 2).copy_(diagonal)
        return out


def _window(totals: Tensor, span: int) -> float:
    """Return after how many tokens a state is below rounding, given decays of ``span`` tokens."""
    most = float(totals.amax())
    if most >= 1:
        return math.inf
    if most <= 0:
        return span
    return span * math.log(forgotten(totals.dtype)) / math.log(most)


def forgotten(dtype: torch.dtype) -> float:
    """Return the product of decays below which a state is smaller than rounding."""
    return torch.finfo(dtype).eps / 16


# --- levels: tiles with the rows of a block and the columns of the block before ------------------


class _Level:
    """The tiles of one level: in each pair of blocks, rows of the second, columns of the first.

    The second block of the last pair may be shorter, or missing.

    Attributes:
        span: number of tokens of a block.
    """

    def __init__(self, like: Tensor, batch: int, tokens: int, span: int) -> None:
        self.span = span
        pairs, rest = divmod(tokens, 2 * span)
        # batched products need evenly spaced matrices: of one pair, of one example, or of all
        self._by_pair = pairs < batch and rest > 0
        size = (pairs, batch) if self._by_pair else (batch, pairs)
        self._tiles = like.new_zeros(*size, span, span)
        self._last = like.new_zeros(batch, max(0, rest - span), span)
        stacks = [_Stack(self._tiles.flatten(0, 1), 0, 2 * span)]
        if self._by_pair:
            stacks = [_Stack(tiles, 2 * span * i, tokens) for i, tiles in enumerate(self._tiles)]
        elif rest:
            stacks = [_Stack(tiles, tokens * i, 2 * span) for i, tiles in enumerate(self._tiles)]
        stacks.append(_Stack(self._last, tokens - rest, tokens))
        self._stacks = [stack for stack in stacks if stack.tiles.numel()]

    def add(self, total: Tensor, u: Tensor, v: Tensor, *, window: int) -> None:
        """Add products of row and column factors to the tiles; join the blocks of each pair.

        Args:
            total: product of each block's decays, stored at the block's first token.
            u: row factors, times the decays since the block's first token.
            v: column factors, times the decays until the block's last token.
            window: number of tokens on either side of a pivot to compute. If it is smaller than a
                block, no blocks are joined.
        """
        for stack in self._stacks:
            rows = stack.of(u, self.span, stack.tiles.shape[1])
            columns = stack.of(v, 0, self.span)
            if window < self.span:
                tiles = stack.tiles[:, :window, -window:]
                tiles.baddbmm_(rows[:, :window], columns[:, -window:].mT)
                continue
            stack.tiles.baddbmm_(rows, columns.mT)
            first, second = (stack.of(total, start, 1) for start in (0, self.span))
            rows *= first
            columns *= second
            first *= second

    def write(self, out: Tensor) -> None:
        """Write the tiles to their rows and columns of the matrix ``out``."""
        tiles, span = self._tiles.transpose(0, 1) if self._by_pair else self._tiles, self.span
        _, height, width = out.shape
        strides = (height * width, 2 * span * (width + 1), width, 1)
        out.as_strided(tiles.shape, strides, span * width).copy_(tiles)
        if self._last.numel():
            end = 2 * span * tiles.shape[1]
            out[:, end + span : height, end : end + span] = self._last


class _Stack(NamedTuple):
    """Tiles (n, rows, columns) of pairs whose first tokens are evenly spaced in memory.

    Attributes:
        tiles: the tiles.
        first: the first token of the first pair, counted through all examples.
        step: number of tokens from one pair to the next.
    """

    tiles: Tensor
    first: int
    step: int

    def of(self, x: Tensor, start: int, count: int) -> Tensor:
        """View ``count`` tokens of each pair, from ``start`` on, (n, count, K); x is contiguous."""
        width = x.shape[-1]
        size, place = (len(self.tiles), count, width), (self.first + start) * width
        return x.as_strided(size, (self.step * width, width, 1), x.storage_offset() + place)
