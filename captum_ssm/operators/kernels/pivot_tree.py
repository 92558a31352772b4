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
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .arithmetic import Scratch
from .rows import Strip
from .truths import are_noted

#: Decays A (B, L, K), row factors U (B, R, K) and column factors V (B, L, K) of K channels.
Factors = tuple[Tensor, Tensor, Tensor]
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
    own: Tensor | None = None,
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
        own: the sum over all channels of row factors times first column factors (B, R), if the
            caller can compute it faster. Default: None, it is computed here.
    """
    total: _Sum | None = None
    for decay, u, columns in blocks:
        if total is None:
            total = _Sum(decay, batch, rows, len(columns), own)
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

    def __init__(
        self, like: Tensor, batch: int, rows: range, lags: int, own: Tensor | None
    ) -> None:
        self.rows = rows
        self.levels = [_Level(like, batch, pairs) for pairs in _all_pairs(rows.stop)]
        self.diagonals = like.new_zeros(lags, batch, rows.stop)
        #: Indices of the lags whose diagonals :meth:`add` sums; ``own`` is the first diagonal.
        self._summed = range(0 if own is None else 1, lags)
        if own is not None:
            self.diagonals[0, :, rows.start :] = own
        self._scratch = Scratch(like)
        #: The tree of the last block, reused if the next block is in the same memory.
        self._prepared: _Tree | None = None

    def add(self, decay: Tensor, u: Tensor, columns: Sequence[Tensor]) -> None:
        """Add a block of channels; the tensors are overwritten."""
        decay, u = decay.contiguous(), self._from_first_token(u.contiguous())
        columns = [column.contiguous() for column in columns]
        products = self._scratch("products", *u.shape)
        for lag, column in enumerate(columns):
            if lag:
                column[:, 1:].addcmul_(decay[:, 1:], columns[lag - 1][:, :-1])
            if lag in self._summed:
                self.diagonals[lag] += torch.mul(u, column, out=products).sum(-1)
        u *= decay
        tree, window = self._tree(decay, u, columns[-1]), math.inf
        for i, level in enumerate(self.levels):
            span = level.pairs.span
            if span == _PROBED and (self.rows.stop >= _LONG or not are_noted(decay)):
                window = _window(decay[:, : self.rows.stop // span * span : span], span)
            if span >= window:
                tree.add_near(i, span)
                break
            tree.steps[i].run()

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

    def _tree(self, total: Tensor, u: Tensor, v: Tensor) -> _Tree:
        """Return the last tree if it was prepared for the same tensors, and a new one otherwise."""
        factors = (total, u, v)
        if self._prepared is None or any(
            x is not y for x, y in zip(self._prepared.factors, factors, strict=True)
        ):
            self._prepared = _Tree(self.levels, factors)
        return self._prepared


class _Tree:
    """All levels of the tree, with in-place steps that are prepared once as views of the factors.

    Attributes:
        steps: one :class:`_Steps` for each level.
    """

    def __init__(self, levels: Sequence[_Level], factors: Factors) -> None:
        self.factors = factors
        self.steps = [level.steps(*factors) for level in levels]
        self._levels = levels
        self._near: dict[tuple[int, int], list[_Product]] = {}

    def add_near(self, first: int, window: int) -> None:
        """Add the products of levels ``first`` and above, for ``window`` tokens around each pivot.

        Entries of all tokens further from a pivot are below rounding.
        """
        if (first, window) not in self._near:
            _, u, v = self.factors
            self._near[first, window] = [
                product
                for level in self._levels[first:]
                for product in level.products(u, v, window)
            ]
        for total, left, right in self._near[first, window]:
            total.baddbmm_(left, right)


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

#: A stack of matrices, and two stacks whose product is added to it.
_Product = tuple[Tensor, Tensor, Tensor]


class _Steps:
    """In-place products and scalings of one level; preparing these small steps once saves time.

    Attributes:
        products: triples of matrices; the product of the last two is added to the first.
        scalings: pairs of tensors; the first is then multiplied by the second.
    """

    def __init__(self) -> None:
        self.products: list[_Product] = []
        self.scalings: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        for total, left, right in self.products:
            total.baddbmm_(left, right)
        for scaled, factor in self.scalings:
            scaled.mul_(factor)


class _Level:
    """The tiles of one level: in each pair of blocks, rows of the second, columns of the first."""

    def __init__(self, like: Tensor, batch: int, pairs: _Pairs) -> None:
        self.pairs = pairs
        # batched products need evenly spaced matrices: for one pair, or for one example
        self.by_pair = pairs.whole < batch and not pairs.even
        size = (pairs.whole, batch) if self.by_pair else (batch, pairs.whole)
        self.tiles = like.new_zeros(*size, pairs.span, pairs.span)
        self.last_tile = like.new_zeros(batch, pairs.rest, pairs.span)

    def steps(self, total: Tensor, u: Tensor, v: Tensor) -> _Steps:
        """Prepare the products of the tiles, and the scalings that join each pair to one block.

        Args:
            total: product of each block's decays, stored at the block's first token.
            u: row factors, times the decays since the block's first token.
            v: column factors, times the decays until the block's last token.
        """
        steps, pairs = _Steps(), self.pairs
        second = total[:, pairs.span :: 2 * pairs.span]
        first = total[:, :: 2 * pairs.span][:, : second.shape[1]]
        steps.products += self.products(u, v, pairs.span)
        if pairs.whole:
            steps.scalings.append((pairs.second(u), first[:, : pairs.whole, None]))
            steps.scalings.append((pairs.first(v), second[:, : pairs.whole, None]))
        if pairs.rest:
            steps.scalings.append((pairs.last_second(u), first[:, pairs.whole :]))
            steps.scalings.append((pairs.last_first(v), second[:, pairs.whole :]))
        steps.scalings.append((first, second))
        return steps

    def products(self, u: Tensor, v: Tensor, window: int) -> list[_Product]:
        """Prepare the products of the tiles, for ``window`` tokens on either side of a pivot."""
        pairs = self.pairs
        found: list[_Product] = []
        if pairs.whole:
            rows, columns = pairs.second(u)[:, :, :window], pairs.first(v)[:, :, -window:].mT
            found += self._products(self.tiles[..., :window, -window:], rows, columns)
        if pairs.rest:
            rows, columns = pairs.last_second(u)[:, :window], pairs.last_first(v)[:, -window:].mT
            found.append((self.last_tile[:, :window, -window:], rows, columns))
        return found

    def write(self, out: Tensor) -> None:
        """Write the tiles to their rows and columns of the matrix ``out``."""
        batch, height, width = out.shape
        span, whole, end = self.pairs.span, self.pairs.whole, self.pairs.end
        place = out.as_strided(
            (batch, whole, span, span),
            (height * width, 2 * span * (width + 1), width, 1),
            span * width,
        )
        place.copy_(self.tiles.transpose(0, 1) if self.by_pair else self.tiles)
        if self.pairs.rest:
            out[:, end + span :, end : end + span] = self.last_tile

    def _products(self, tiles: Tensor, rows: Tensor, columns: Tensor) -> Iterable[_Product]:
        if self.by_pair:
            rows, columns = rows.transpose(0, 1), columns.transpose(0, 1)
        elif self.pairs.even:
            # the blocks are evenly spaced in memory, so that these are views
            return [(tiles.flatten(0, 1), rows.flatten(0, 1), columns.flatten(0, 1))]
        return zip(tiles.unbind(), rows.unbind(), columns.unbind(), strict=True)


class _Pairs:
    """Tokens in pairs of neighboring blocks; the last pair's second block may be shorter.

    Attributes:
        span: number of tokens of a block.
        whole: number of pairs of whole blocks.
        end: the token after the last whole pair.
        rest: number of tokens of a last pair's shorter second block; 0 if there is none.
        even: whether the whole pairs cover all tokens.
    """

    def __init__(self, tokens: int, span: int) -> None:
        self.span = span
        self.whole = tokens // (2 * span)
        self.end = self.whole * 2 * span
        self.rest = max(0, tokens - self.end - span)
        self.even = self.end == tokens

    def first(self, x: Tensor) -> Tensor:
        """Return the first blocks of whole pairs, (B, pairs, span, K)."""
        return self._blocks(x)[:, :, 0]

    def second(self, x: Tensor) -> Tensor:
        """Return the second blocks of whole pairs, (B, pairs, span, K)."""
        return self._blocks(x)[:, :, 1]

    def last_first(self, x: Tensor) -> Tensor:
        """Return the first block of the last pair, (B, span, K)."""
        return x[:, self.end : self.end + self.span]

    def last_second(self, x: Tensor) -> Tensor:
        """Return the second block of the last pair, (B, rest, K)."""
        return x[:, self.end + self.span :]

    def _blocks(self, x: Tensor) -> Tensor:
        return torch.unflatten(x[:, : self.end], 1, (self.whole, 2, self.span))


def _all_pairs(tokens: int) -> Iterator[_Pairs]:
    """Yield the pairs of blocks of each level of the tree: blocks of 1 token, 2, 4, and so on."""
    span = 1
    while span < tokens:
        yield _Pairs(tokens, span)
        span *= 2
