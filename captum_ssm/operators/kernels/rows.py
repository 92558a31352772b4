"""Rows of matrices over tokens: strips of neighboring rows, and positions of single ones.

A matrix (B, L, L) that is used row by row need never be held whole.  A strip holds R of its rows,
and of these the columns that can differ from zero: in a causal matrix they end at the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import QueryError
from .bands import Band
from .portions import at_a_time
from .truths import holds

# --- strips ------------------------------------------------------------------------------------


class Strip(NamedTuple):
    """Some rows of a matrix (B, L, L), or of one for each head (B, H, L, L).

    Attributes:
        entries: (B, R, W) or (B, H, R, W).
        rows: which rows they are, R of them, ascending.
        columns: which columns they are, W of them, ascending; all others are zero.
    """

    entries: Tensor
    rows: range
    columns: range

    def moved(self, down: int, right: int, tokens: int) -> Strip:
        """Move the entries to other rows and columns.

        Args:
            down, right: how far; negative numbers move up and left.
            tokens: L; entries that leave the matrix are cut off.
        """
        rows, columns = clipped(self.rows, down, tokens), clipped(self.columns, right, tokens)
        top, first = rows.start - self.rows.start - down, columns.start - self.columns.start - right
        kept = self.entries[..., top : top + len(rows), first : first + len(columns)]
        return Strip(kept, rows, columns)

    def full(self, tokens: int) -> Tensor:
        """Return the rows with all columns, (B, R, L) or (B, H, R, L)."""
        if len(self.columns) == tokens:
            return self.entries
        return self.covering(self.rows, range(tokens)).entries

    def covering(self, rows: range, columns: range) -> Strip:
        """Extend by zeros to at least these rows and columns; the same strip if it has them."""
        if self.columns and columns:  # an empty range may begin anywhere
            first = min(self.columns.start, columns.start)
            columns = range(first, max(self.columns.stop, columns.stop))
        columns = columns or self.columns
        if (rows, columns) == (self.rows, self.columns):
            return self
        size = *self.entries.shape[:-2], len(rows), len(columns)
        out = Strip(self.entries.new_zeros(size), rows, columns)
        if self.rows and self.columns:
            out.add(self)
        return out

    def add(self, other: Strip) -> None:
        """Add a strip of no more rows and columns, in place."""
        top, first = other.rows.start - self.rows.start, other.columns.start - self.columns.start
        height, width = len(other.rows), len(other.columns)
        self.entries[..., top : top + height, first : first + width] += other.entries


def sum_strips(strips: Iterable[Strip], rows: range) -> Strip:
    """Return the sum of strips, each within ``rows``; their entries are overwritten."""
    found = iter(strips)
    out = next(found).covering(rows, range(0))
    for strip in found:
        if strip.rows and strip.columns:
            out = out.covering(rows, strip.columns)
            out.add(strip)
    return out


def sum_of_lags(entries: Callable[[Tensor], Strip], band: Band, rows: range, tokens: int) -> Strip:
    """Return rows of matrix . band, given the matrix's strip by its column factors."""
    if [*band] == [0]:
        return entries(band[0])
    return sum_strips(
        (entries(factor).moved(0, -lag, tokens) for lag, factor in band.items()), rows
    )


def clipped(positions: range, by: int, tokens: int) -> range:
    """Move a range by ``by`` places, and cut it to 0 .. tokens."""
    start = min(max(positions.start + by, 0), tokens)
    return range(start, max(start, min(positions.stop + by, tokens)))


def slices(rows: range, height: int) -> Iterator[slice]:
    """Cut rows into slices of at most ``height``."""
    for start in range(rows.start, rows.stop, height):
        yield slice(start, min(start + height, rows.stop))


# --- positions ---------------------------------------------------------------------------------

#: Query positions, common to all examples (a sequence of Q) or per example (a (B, Q) tensor).
Positions = Sequence[int] | Tensor

#: Elements of one stack of adjoint vectors in the generic row-by-row code: 16 MiB in float32, which
#: a processor's allocator keeps for the next one, and 256 MiB where launches cost more than memory.
_STACK_ELEMENTS = 2**22
_STACK_ELEMENTS_LAUNCHED = 2**26


def per_example(positions: Positions, batch: int, tokens: int, device: torch.device) -> Tensor:
    """Convert positions, counted from either end, to tokens (B, Q), or raise QueryError."""
    device_of = positions.device if isinstance(positions, Tensor) else "cpu"
    index = torch.as_tensor(positions, device=device_of)
    index = index.expand(batch, -1) if index.dim() == 1 else index
    if not index.numel() or not holds(((index >= -tokens) & (index < tokens)).all()):
        raise QueryError(f"positions must lie in [{-tokens}, {tokens}), got {positions}.")
    return (index % tokens).to(device)


def in_stacks(rows: range, elements: int, device: torch.device) -> Iterator[range]:
    """Yield rows in parts whose stacks, of vectors of ``elements`` each, are not too large."""
    most = at_a_time(_STACK_ELEMENTS, device, _STACK_ELEMENTS_LAUNCHED)
    size = max(1, most // max(1, elements))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def by_query(positions: Positions, device: torch.device) -> Tensor:
    """Q positions ((Q,) or (Q, B)) as a tensor (Q, 1 or B)."""
    index = torch.as_tensor(positions, device=device)
    return index[:, None] if index.dim() == 1 else index


def at_positions(x: Tensor, positions: Positions) -> Tensor:
    """Return entries of ``x`` (B, L, H, P), broadcastable, at Q positions, (Q, 1 or B, 1, H, P)."""
    if x.shape[1] == 1:
        return x[None]
    index = by_query(positions, x.device)
    return x[torch.arange(len(x), device=x.device), index][:, :, None]


def tokens_at(x: Tensor, places: Tensor) -> Tensor:
    """Tokens of each example, x (B or 1, L, ...), at its own places (B, Q), as (B, Q, ...)."""
    places = places.to(x.device)
    x = x.expand(len(places), *x.shape[1:])
    return x[torch.arange(len(places), device=x.device)[:, None], places]


def unit_vectors(positions: Positions, tokens: int, like: Tensor) -> Tensor:
    """Unit vectors (Q, 1 or B, L, 1, 1) of Q positions ((Q,) or (Q, B))."""
    index = by_query(positions, like.device)
    token = torch.arange(tokens, device=like.device)
    return (token == index[..., None]).to(like.dtype)[..., None, None]
