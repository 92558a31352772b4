"""Sums of semiseparable matrices by a tree of pivots.

The lower-triangular matrix

    M[i, j] = sum over k of U[i, k] (product of A[t, k] over j < t <= i) V[j, k]

is what every diagonal recurrence computes.  Splitting each block of tokens at a pivot turns
everything left of and below it into one matrix product of factors that only ever hold products of
decays, each at most as large as the longest product inside the block: no quotient of decays, no
exponential of a difference of cumulative sums, hence no overflow and no cancellation.

The tree begins with blocks of one token and joins neighbours; the last block may be shorter than
its neighbour or have none, so no length needs padding.

Once every block of some length has been forgotten by all of the channels at hand, that is, once
its decays multiply to less than rounding, larger blocks meet in as many tokens on either side of
their pivot and nowhere else.

A banded matrix on the right stays in the tree.  With factors V[lag] that token t receives from
token t - lag, lags first .. last, what token j has written is complete once token j + last has
passed, and from there on it fades like any state: column j of the product is column j + last of a
semiseparable matrix, whose factors are a few steps of the recurrence itself, and the few entries
before that are single products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .levels import Level, Product, all_pairs
from .scratch import Scratch
from .strips import Strip

#: Decays A (B, L, K), row factors U (B, R, K) and column factors V (B, L, K) of K of the channels.
Factors = tuple[Tensor, Tensor, Tensor]
#: The same with column factors for neighbouring lags, in ascending order.
BandFactors = tuple[Tensor, Tensor, Sequence[Tensor]]
#: Tokens of a block that are asked how much of what came before they leave.
_ASKED = 64


def semiseparable_sum(blocks: Iterable[Factors], batch: int, tokens: int) -> Tensor:
    """The sum M over all blocks of channels, diagonal included, as (B, L, L).

    Args:
        blocks: yields decays, row factors and column factors; the tensors are overwritten.
        batch: B.
        tokens: L.
    """
    whole = ((decay, u, [v]) for decay, u, v in blocks)
    return semiseparable_strip(whole, batch, tokens, range(tokens)).entries


def semiseparable_strip(
    blocks: Iterable[BandFactors],
    batch: int,
    tokens: int,
    rows: range,
    first_lag: int = 0,
    own: Tensor | None = None,
) -> Strip:
    """Some rows of the sum over all blocks of channels of M times a banded matrix.

    The tree takes all tokens up to the last of the rows; strips that begin far from the first
    token are the business of :mod:`.pivot`.

    Args:
        blocks: yields decays and column factors of the tokens up to the last of the rows, and row
            factors of the rows; the tensors are overwritten.  All blocks have as many lags.
        batch: B.
        tokens: L.
        rows: neighbouring rows, ascending; at least one.
        first_lag: the lag of the first column factors. Default: 0.
        own: the sum over all blocks of products of row factors and first column factors, (B, R), if
            there is a cheaper way to it. Default: None, it is taken here.
    """
    total: _Sum | None = None
    for decay, u, columns in blocks:
        if total is None:
            total = _Sum(decay, batch, rows, len(columns), own)
        total.add(decay, u, columns)
    if total is None:
        raise ValueError("semiseparable_strip needs at least one block")
    out = total.assembled()[:, rows.start :]
    last_lag = first_lag + len(total.diagonals) - 1
    return Strip(out, rows, range(out.shape[-1])).moved(0, -last_lag, tokens)


class _Sum:
    """The sum so far, in pieces; column j + last lag stands for column j of the product.

    Attributes:
        rows: the rows wanted; those before them are zero.
        levels: below the diagonal.
        diagonals: for every lag, the entries that the tokens a lag earlier have, (lags, B, R).
    """

    def __init__(
        self, like: Tensor, batch: int, rows: range, lags: int, own: Tensor | None
    ) -> None:
        self.rows = rows
        self.levels = [Level(like, batch, pairs) for pairs in all_pairs(rows.stop)]
        self.diagonals = like.new_zeros(lags, batch, rows.stop)
        self._summed = range(0 if own is None else 1, lags)
        if own is not None:
            self.diagonals[0, :, rows.start :] = own
        self._scratch = Scratch(like)
        self._prepared: _Tree | None = None

    def add(self, decay: Tensor, u: Tensor, columns: Sequence[Tensor]) -> None:
        """Add what some channels contribute; the tensors are overwritten."""
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
            if span == _ASKED:
                window = _window(decay[:, : self.rows.stop // span * span : span], span)
            if span >= window:
                tree.near(i, span)
                break
            tree.steps[i].run()

    def _from_first_token(self, u: Tensor) -> Tensor:
        """Row factors of all tokens up to the last of the rows."""
        if not self.rows.start:
            return u
        out = self._scratch("rows", len(u), self.rows.stop, u.shape[-1])
        out[:, : self.rows.start] = 0
        out[:, self.rows.start :] = u
        return out

    def assembled(self) -> Tensor:
        """All pieces in one matrix (B, last row, last row + lags - 1)."""
        lags, batch, height = self.diagonals.shape
        out = self.diagonals.new_zeros(batch, height, height + lags - 1)
        for level in self.levels:
            level.put(out)
        for ahead, diagonal in enumerate(self.diagonals.flip(0)):
            out.diagonal(ahead, 1, 2).copy_(diagonal)
        return out

    def _tree(self, total: Tensor, u: Tensor, v: Tensor) -> _Tree:
        """What joins all tokens; kept for blocks that lie in the same memory."""
        factors = (total, u, v)
        if self._prepared is None or any(
            x is not y for x, y in zip(self._prepared.factors, factors, strict=True)
        ):
            self._prepared = _Tree(self.levels, factors)
        return self._prepared


class _Tree:
    """The steps of all levels between some factors.

    Attributes:
        steps: of each level.
    """

    def __init__(self, levels: Sequence[Level], factors: Factors) -> None:
        self.factors = factors
        self.steps = [level.steps(*factors) for level in levels]
        self._levels = levels
        self._near: dict[tuple[int, int], list[Product]] = {}

    def near(self, first: int, window: int) -> None:
        """The levels from ``first`` on, where nothing reaches further than a window."""
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
    """How many tokens, at most, are not forgotten, given the products of decays over each span."""
    most = float(totals.amax())
    if most >= 1:
        return math.inf
    if most <= 0:
        return span
    return span * math.log(forgotten(totals.dtype)) / math.log(most)


def forgotten(dtype: torch.dtype) -> float:
    """The product of decays behind which nothing is left but rounding."""
    return torch.finfo(dtype).eps / 16
