"""Strips of semiseparable matrices cut at a pivot: one product of reads and decayed writes.

    alpha_c[i, j] = sum over n of reads[i, n] (product of fade[t, n, c], j < t <= i) writes[j, n]

Earlier tokens reach a strip through the state of the last token before it, the *pivot*, so that the
entries there are one matrix product: of the rows' reads, faded since the pivot, and of the columns'
writes, faded until the pivot (the observability and the controllability matrix of a time-varying
system).  Products of fades up to the pivot come from sums of steps in one pass, which for strips of
few rows costs less than the tree of :mod:`.pivot_tree`.  The tree does the strip's tokens.

A band inside the recurrence has written all of column j by the time m = j + last, where last is its
largest lag.  From then on the column fades like any other.  So the columns of the product are, with
t = m - last + lag,

    Y[m] = sum over lags of (product of fade[s] over t < s <= m) writes[t] band_lag[t]

:takes: a recurrence that gives its reads, writes and fades (:class:`Fading`), row factors
    (B, L, H, 1), a band, and R neighboring rows.
:gives: these rows of the sum over channels (B, R, W).
:cost: (R + 1) L multiplications with additions for each of H N states, less what is forgotten, and
    the tree over R tokens.
:literature: Dewilde and van der Veen, Time-Varying Systems and Computations, 1998, for the factors
    of such blocks (Hankel operators); Chandrasekaran et al., Some Fast Algorithms for Sequentially
    Semiseparable Representations, 2005.
:naive version: ``kernels.banded_semiseparable``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import doubled
from .bands import Band
from .pivot_tree import forgotten
from .portions import Heads, at_a_time, gather_heads
from .rows import Strip

#: Fewest tokens before a strip from which to cut it is worth while.
LEAST = 64
#: Elements of a factor, and columns, that are worked on at a time.
_ELEMENTS = 2**18
_COLUMNS = 512
#: Tokens accumulated one by one.
_RUN = 32

#: From tokens to the products of fades between them and a pivot, (B, T, N, H).
Fades = Callable[[slice], Tensor]


class Fading(Protocol):
    """The methods of a recurrence by which it can be cut."""

    shape: tuple[int, int, int, int]  # B, L, H, 1

    def cut(self, tokens: slice) -> Fading:
        """Restrict the recurrence to neighboring tokens."""

    def entries(self, left: Tensor, band: Band, rows: range) -> Strip:
        """Return some rows of recurrence . band; by the tree where few tokens come before them."""

    def by_memory(self, tokens: slice) -> Tensor:
        """Return the heads (H,), sorted by how fast they forget."""

    def fades(self, token: int, tokens: int, heads: Heads) -> Fades:
        """Products of fades between a token and all of the first ``tokens``."""

    def reads(self, tokens: slice, heads: Heads) -> Tensor:
        """Factors of the state in each token's output, (B, T, N, 1 or H)."""

    def writes(self, tokens: slice, heads: Heads) -> Tensor:
        """Factors of each token's :meth:`entering` in the state, (B, T, N, 1 or H)."""

    def entering(self, values: Tensor) -> Tensor:
        """Scale values (B, L, H) by the steps with which they enter the state, broadcastable."""


def strip_by_pivot(recurrence: Fading, left: Tensor, band: Band, rows: range) -> Strip:
    """Return some rows of recurrence . band that begin after other tokens.

    Args:
        recurrence: the recurrence.
        left: row factors (B, L, H, 1), broadcastable.
        band: the inner factor (B, L, H, 1), broadcastable, by lag.
        rows: neighboring rows, ascending; the first is not the first token's.
    """
    late = _late_columns(recurrence, left, band, rows)
    columns = range(late.columns.stop)
    out = late.entries.new_zeros(len(late.entries), len(rows), len(columns))
    out[:, :, late.columns.start : late.columns.stop] = late.entries
    _add_early_columns(out, recurrence, left, band, rows)
    return Strip(out, rows, columns)


def _late_columns(recurrence: Fading, left: Tensor, band: Band, rows: range) -> Strip:
    """Return by the tree the strip's columns that are not wholly written before the rows."""
    first, last = min(band), max(band)
    _, tokens, *_ = recurrence.shape
    # from the first of these columns, or an earlier token that writes to one of them
    start = max(0, rows.start - max(last, last - first))
    part = slice(start, min(tokens, rows.stop - min(0, first)))
    found = recurrence.cut(part).entries(
        left.expand(recurrence.shape)[:, part],
        {lag: factor.expand(recurrence.shape)[:, part] for lag, factor in band.items()},
        range(rows.start - start, rows.stop - start),
    )
    begin = max(0, min(tokens, rows.start - last))
    columns = range(begin, max(begin, found.columns.stop + start))
    kept = found.entries[:, :, len(found.columns) - len(columns) :]
    return Strip(kept, rows, columns)


def _add_early_columns(
    out: Tensor, recurrence: Fading, left: Tensor, band: Band, rows: range
) -> None:
    """Add the columns that are wholly written before the rows begin, by the state at the pivot."""
    batch, tokens, *_ = recurrence.shape
    last = max(band)
    order = recurrence.by_memory(slice(rows.start))
    # factors, by how long before the last writing to a column they write
    written = {
        last - lag: gather_heads(
            recurrence.entering(factor.expand(recurrence.shape).squeeze(-1)), order
        )
        for lag, factor in band.items()
    }
    times = range(max(0, last), min(rows.start, tokens + last))
    states = recurrence.writes(slice(1), slice(1)).shape[2]
    longest = batch * max(len(rows), min(_COLUMNS, rows.start))
    size = max(1, at_a_time(_ELEMENTS, left.device) // (longest * states))
    here = slice(rows.start, rows.stop)
    row = gather_heads(left.expand(recurrence.shape)[:, here, :, 0], order)[:, :, None]
    for start in range(0, len(order), size):
        part = slice(start, start + size)
        some = order[part]
        fades = recurrence.fades(rows.start - 1, rows.stop, some)
        read = fades(here).mul_(recurrence.reads(here, some)).mul_(row[..., part])
        values = {back: factor[:, :, part] for back, factor in written.items()}
        for stop in range(times.stop, times.start, -_COLUMNS):
            some_times = range(max(times.start, stop - _COLUMNS), stop)
            columns = _at_pivot(values, recurrence, fades, some_times, some)
            into = out[:, :, some_times.start - last : some_times.stop - last]
            into.baddbmm_(read.flatten(2), columns.flatten(2).mT)
            latest = some_times.start - 1  # of the tokens that wrote to columns still to come
            if latest >= times.start and _all_forgotten(fades, latest, out.dtype):
                break


def _all_forgotten(fades: Fades, token: int, dtype: torch.dtype) -> bool:
    """Return True if nothing of a token's state, or of any earlier one, is left at the pivot."""
    return bool(fades(slice(token, token + 1)).amax() <= forgotten(dtype))


def _at_pivot(values: Band, recurrence: Fading, fades: Fades, times: range, heads: Heads) -> Tensor:
    """Return the state at the pivot from each column completed at ``times``, (B, T, N, H)."""
    tokens = slice(max(0, times.start - max(values)), times.stop - min(values))
    keys = fades(tokens).mul_(recurrence.writes(tokens, heads))
    if len(values) == 1:
        (factor,) = values.values()
        return keys.mul_(factor[:, tokens, None])
    out = keys.new_zeros(len(keys), len(times), *keys.shape[2:])
    for back, factor in values.items():
        skipped = max(0, back - times.start)  # written before the first token
        source = slice(times.start + skipped - back, max(0, times.stop - back))
        key = keys[:, source.start - tokens.start : max(0, source.stop - tokens.start)]
        out[:, skipped:].addcmul_(key, factor[:, source, None])
    return out


def from_pivot(x: Tensor, pivot: int, *, product: bool) -> Tensor:
    """Sums or products of the steps between a token and each other, (B, T, H) in float64.

    From t to a later t' these are the steps t + 1 to t'.

    Args:
        x: the steps (B, T, H).
        pivot: the token.
        product: whether to multiply.
    """
    after = _accumulated(x[:, pivot + 1 :], product)
    before = _accumulated(x[:, 1 : pivot + 1].flip(1), product).flip(1)
    here = doubled(torch.full_like(x[:, :1], float(product)))
    return torch.cat([before, here, after], 1)


def _accumulated(x: Tensor, product: bool) -> Tensor:
    """Running sums or products over tokens (B, T, H), in float64.

    A loop over the places in a run does all runs at once; each then takes up the runs before it.
    """
    tokens = x.shape[1]
    # padded without effect, and by a whole run more: there may be no tokens
    padding = (0, 0, 0, -tokens % _RUN + _RUN)
    padded = F.pad(doubled(x), padding, value=float(product))
    runs = padded.view(len(x), -1, _RUN, x.shape[2])
    for i in range(1, _RUN):
        _join(runs[:, :, i], runs[:, :, i - 1], product)
    ends = runs[:, :-1, -1]  # the total of each run but the last
    ends = ends.cumprod(1) if product else ends.cumsum(1)
    _join(runs[:, 1:], ends[:, :, None], product)
    return padded[:, :tokens]


def _join(into: Tensor, x: Tensor, product: bool) -> None:
    """Multiply ``into`` by x, or add x to it, in place."""
    if product:
        into *= x
    else:
        into += x
