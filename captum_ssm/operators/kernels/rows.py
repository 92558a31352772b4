"""Rows of matrices over tokens: strips of neighboring rows, and positions of single rows.

A matrix (B, L, L) that is used row by row need not be in memory as a whole.  A strip stores R of
its rows, without columns that are zero: in a causal matrix the columns end at the diagonal.
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


class Strip(NamedTuple):
    """Some rows of a matrix (B, L, L), or of one matrix per head (B, H, L, L).

    Attributes:
        entries: the entries in these rows and columns (B, R, W) or (B, H, R, W).
        rows: indices of the R rows, ascending.
        columns: indices of the W columns, ascending; the entries of all other columns are zero.
    """

    entries: Tensor
    rows: range
    columns: range

    def moved(self, down: int, right: int, tokens: int) -> Strip:
        """Return a strip with the same entries, moved to different rows and columns.

        Args:
            down: number of rows to move down; negative numbers move up.
            right: number of columns to move right; negative numbers move left.
            tokens: size of the matrix, L; entries moved outside the matrix are dropped.
        """
        rows, columns = clipped(self.rows, down, tokens), clipped(self.columns, right, tokens)
        top, first = rows.start - self.rows.start - down, columns.start - self.columns.start - right
        entries = self.entries[..., top : top + len(rows), first : first + len(columns)]
        return Strip(entries, rows, columns)

    def full(self, tokens: int) -> Tensor:
        """Return the rows' entries in all columns, (B, R, L) or (B, H, R, L)."""
        if len(self.columns) == tokens:
            return self.entries
        return self.covering(self.rows, range(tokens)).entries

    def covering(self, rows: range, columns: range) -> Strip:
        """Return the strip, padded with zeros to ``rows`` and to at least ``columns``."""
        if self.columns and columns:  # an empty range may begin anywhere
            first = min(self.columns.start, columns.start)
            columns = range(first, max(self.columns.stop, columns.stop))
        columns = columns or self.columns  # an empty range asks for no column
        if (rows, columns) == (self.rows, self.columns):
            return self
        size = *self.entries.shape[:-2], len(rows), len(columns)
        out = Strip(self.entries.new_zeros(size), rows, columns)
        if self.rows and self.columns:
            out.add(self)
        return out

    def add(self, other: Strip) -> None:
        """Add in place a strip whose rows and columns are all in this strip."""
        top, first = other.rows.start - self.rows.start, other.columns.start - self.columns.start
        height, width = len(other.rows), len(other.columns)
        self.entries[..., top : top + height, first : first + width] += other.entries


def sum_strips(strips: Iterable[Strip], rows: range) -> Strip:
    """Return the sum of strips whose rows are within ``rows``; may overwrite the first strip."""
    remaining = iter(strips)
    out = next(remaining).covering(rows, range(0))
    for strip in remaining:
        if strip.rows and strip.columns:
            out = out.covering(rows, strip.columns)
            out.add(strip)
    return out


def sum_of_lags(
    strip_for: Callable[[Tensor], Strip], band: Band, rows: range, tokens: int
) -> Strip:
    """Return ``rows`` of matrix . band, given a function for rows of matrix . diag(right)."""
    if [*band] == [0]:
        return strip_for(band[0])
    strips = (strip_for(factor).moved(0, -lag, tokens) for lag, factor in band.items())
    return sum_strips(strips, rows)


def clipped(positions: range, by: int, tokens: int) -> range:
    """Move a range by ``by``, and clip it to 0 .. tokens."""
    start = min(max(positions.start + by, 0), tokens)
    return range(start, max(start, min(positions.stop + by, tokens)))


def slices(rows: range, height: int) -> Iterator[slice]:
    """Yield slices of at most ``height`` rows."""
    for start in range(rows.start, rows.stop, height):
        yield slice(start, min(start + height, rows.stop))


# --- positions ---------------------------------------------------------------------------------

#: Query positions: a sequence of Q for all examples, or a tensor (B, Q) for each example.
Positions = Sequence[int] | Tensor

#: Largest number of elements of one stack of vectors in :mod:`~captum_ssm.operators.generic`:
#: 16 MiB in float32, which a CPU's allocator reuses, and 256 MiB on a GPU, to save launches.
_STACK_ELEMENTS = 2**22
_STACK_ELEMENTS_LAUNCHED = 2**26


def per_example(positions: Positions, batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return positions as token indices (B, Q); negative positions count from the end."""
    # lists are checked on the CPU, which needs no reading from a GPU
    index_device = positions.device if isinstance(positions, Tensor) else "cpu"
    index = torch.as_tensor(positions, device=index_device)
    index = index.expand(batch, -1) if index.dim() == 1 else index
    if not index.numel() or not holds(((index >= -tokens) & (index < tokens)).all()):
        accepted = f"positions must lie in [{-tokens}, {tokens})"
        raise QueryError(f"{accepted}, got {positions}. Pass one or more such token positions.")
    return (index % tokens).to(device)


def in_stacks(rows: range, elements: int, device: torch.device) -> Iterator[range]:
    """Yield ranges of ``rows`` whose vectors, of ``elements`` entries per row, fit into memory."""
    most = at_a_time(_STACK_ELEMENTS, device, _STACK_ELEMENTS_LAUNCHED)
    size = max(1, most // max(1, elements))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def by_query(positions: Positions, device: torch.device) -> Tensor:
    """Convert Q positions, (Q,) or (Q, B), to a tensor (Q, 1 or B)."""
    index = torch.as_tensor(positions, device=device)
    return index[:, None] if index.dim() == 1 else index


def at_positions(x: Tensor, positions: Positions) -> Tensor:
    """Return ``x``, broadcastable to (B, L, H, P), at Q positions, as (Q, 1 or B, 1, H, P)."""
    if x.shape[1] == 1:
        return x[None]
    index = by_query(positions, x.device)
    return x[torch.arange(len(x), device=x.device), index][:, :, None]


def tokens_at(x: Tensor, places: Tensor) -> Tensor:
    """Return entries (B, Q, ...) of ``x`` (B or 1, L, ...) at the tokens ``places`` (B, Q)."""
    places = places.to(x.device)
    x = x.expand(len(places), *x.shape[1:])
    return x[torch.arange(len(places), device=x.device)[:, None], places]


def unit_vectors(positions: Positions, tokens: int, like: Tensor) -> Tensor:
    """Return unit vectors (Q, 1 or B, L, 1, 1) for Q positions, (Q,) or (Q, B)."""
    index = by_query(positions, like.device)
    token = torch.arange(tokens, device=like.device)
    return (token == index[..., None]).to(like.dtype)[..., None, None]
