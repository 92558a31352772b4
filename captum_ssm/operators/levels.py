"""The levels of a tree of pivots: where the rows of blocks meet the columns of those before them.

See :mod:`.semiseparable` for what the tree computes.  Shapes: B examples, R rows, K channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

#: A stack of matrices, and two to whose product it is added.
Product = tuple[Tensor, Tensor, Tensor]


class Steps:
    """Products and scalings in place, prepared once: there are many, some of them small.

    Attributes:
        products: matrices, to which the product of two others is added.
        scalings: tensors, each then scaled by another.
    """

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.scalings: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        for total, left, right in self.products:
            total.baddbmm_(left, right)
        for scaled, factor in self.scalings:
            scaled.mul_(factor)


class Level:
    """The tiles where the rows of second blocks meet the columns of first ones."""

    def __init__(self, like: Tensor, batch: int, pairs: Pairs) -> None:
        self.pairs = pairs
        # batched products want evenly spaced matrices: those of one pair, or of one example
        self.by_pair = pairs.whole < batch and not pairs.even
        size = (pairs.whole, batch) if self.by_pair else (batch, pairs.whole)
        self.tiles = like.new_zeros(*size, pairs.span, pairs.span)
        self.last_tile = like.new_zeros(batch, pairs.rest, pairs.span)

    def steps(self, total: Tensor, u: Tensor, v: Tensor) -> Steps:
        """What adds to the tiles, and then makes one block of each pair, (B, R, K) each.

        Args:
            total: the product of each block's decays, at the block's first token.
            u: row factors with the decays from their block's first token on.
            v: column factors with the decays to their block's last token.
        """
        steps, pairs = Steps(), self.pairs
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

    def products(self, u: Tensor, v: Tensor, window: int) -> list[Product]:
        """What adds to the tiles, from so many tokens on either side of a pivot."""
        pairs = self.pairs
        found: list[Product] = []
        if pairs.whole:
            rows, columns = pairs.second(u)[:, :, :window], pairs.first(v)[:, :, -window:].mT
            found += self._products(self.tiles[..., :window, -window:], rows, columns)
        if pairs.rest:
            rows, columns = pairs.last_second(u)[:, :window], pairs.last_first(v)[:, -window:].mT
            found.append((self.last_tile[:, :window, -window:], rows, columns))
        return found

    def put(self, out: Tensor) -> None:
        """Write the tiles to their places in a matrix."""
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

    def _products(self, tiles: Tensor, rows: Tensor, columns: Tensor) -> Iterable[Product]:
        if self.by_pair:
            rows, columns = rows.transpose(0, 1), columns.transpose(0, 1)
        elif self.pairs.even:
            # one run of memory: these are views
            return [(tiles.flatten(0, 1), rows.flatten(0, 1), columns.flatten(0, 1))]
        return zip(tiles.unbind(), rows.unbind(), columns.unbind(), strict=True)


class Pairs:
    """Tokens in pairs of neighbouring blocks; the last pair's second block may be shorter.

    Attributes:
        span: tokens of a block.
        whole: pairs of whole blocks.
        end: where these end.
        rest: tokens of the second block of a last pair; 0 if there is none.
        even: whether the whole pairs are all there is.
    """

    def __init__(self, tokens: int, span: int) -> None:
        self.span = span
        self.whole = tokens // (2 * span)
        self.end = self.whole * 2 * span
        self.rest = max(0, tokens - self.end - span)
        self.even = self.end == tokens

    def first(self, x: Tensor) -> Tensor:
        """The first blocks of whole pairs, (B, pairs, span, K)."""
        return self._blocks(x)[:, :, 0]

    def second(self, x: Tensor) -> Tensor:
        """The second blocks of whole pairs, (B, pairs, span, K)."""
        return self._blocks(x)[:, :, 1]

    def last_first(self, x: Tensor) -> Tensor:
        """The first block of the last pair, (B, span, K)."""
        return x[:, self.end : self.end + self.span]

    def last_second(self, x: Tensor) -> Tensor:
        """The second block of the last pair, (B, rest, K)."""
        return x[:, self.end + self.span :]

    def _blocks(self, x: Tensor) -> Tensor:
        return torch.unflatten(x[:, : self.end], 1, (self.whole, 2, self.span))


def all_pairs(tokens: int) -> Iterator[Pairs]:
    """The levels of the tree, from blocks of one token on."""
    span = 1
    while span < tokens:
        yield Pairs(tokens, span)
        span *= 2
