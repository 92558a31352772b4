"""Neighboring rows (strips) of semiseparable matrices, as products of factors at a pivot token.

    alpha_c[i, j] = sum over n of reads[i, n] (product of fade[t, n, c], j < t <= i) writes[j, n]

The rows of a strip depend on earlier tokens only through the state after the last token before the
strip, the *pivot*.  So the entries in earlier columns are one matrix product: the rows' reads times
the decays since the pivot, and the columns' writes times the decays until the pivot (the
observability and the controllability matrix of a time-varying system).  The products of decays are
computed from sums of steps in one pass; for strips of few rows this costs less than the tree of
:mod:`.pivot_tree`.  The tree computes the entries in the columns of the strip's own tokens.

With a band to the right of the recurrence, token m = j + last completes the writing of column j,
where last is the band's largest lag.  After token m the column decays like any other column.  So
the columns of the product are, with t = m - last + lag,

    Y[m] = sum over lags of (product of fade[s] over t < s <= m) writes[t] band_lag[t]

:takes: a recurrence with methods for reads, writes and decays (:class:`Fading`), row factors
    (B, L, H, 1), a band, and R neighboring rows.
:gives: these rows of the sum over channels (B, R, W).
:cost: (R + 1) L multiplications with additions for each of H N states, fewer if decays make early
    columns negligible, and the tree over R tokens.
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

#: Smallest number of tokens before a strip for which this method saves time.
LEAST = 64
#: Largest number of elements of a factor, and largest number of columns, to compute together.
_ELEMENTS = 2**18
_COLUMNS = 512
#: Number of tokens in each run of :func:`_accumulated`.
_RUN = 32

#: Function that returns the products of decays between a slice of tokens and a pivot (B, T, N, H).
Fades = Callable[[slice], Tensor]


class Fading(Protocol):
    """The methods of a recurrence that :func:`strip_by_pivot` calls to compute rows."""

    shape: tuple[int, int, int, int]  # B, L, H, 1

    def cut(self, tokens: slice) -> Fading:
        """Restrict the recurrence to neighboring tokens."""

    def entries(self, left: Tensor, band: Band, rows: range) -> Strip:
        """Return ``rows`` of diag(left) . recurrence . band, summed over channels."""

    def by_memory(self, tokens: slice) -> Tensor:
        """Return head indices (H,), from the fastest decay over ``tokens`` to the slowest."""

    def fades(self, token: int, tokens: int, heads: Heads) -> Fades:
        """Return a function for decays between the first ``tokens`` and the pivot ``token``."""

    def reads(self, tokens: slice, heads: Heads) -> Tensor:
        """Return reads[t, n], the factor of state n in token t's output, (B, T, N, 1 or H)."""

    def writes(self, tokens: slice, heads: Heads) -> Tensor:
        """Return writes[t, n], the factor of token t's input in state n, (B, T, N, 1 or H)."""

    def entering(self, values: Tensor) -> Tensor:
        """Return ``values`` (B, L, H) times the step sizes, or ``values`` if there are none."""


def strip_by_pivot(recurrence: Fading, left: Tensor, band: Band, rows: range) -> Strip:
    """Return ``rows`` of diag(left) . recurrence . band, summed over channels.

    Args:
        recurrence: the recurrence.
        left: row factors, broadcastable to (B, L, H, 1).
        band: the inner factor: by lag, factors broadcastable to (B, L, H, 1).
        rows: neighboring rows, ascending; the first row is not row 0.
    """
    late = _late_columns(recurrence, left, band, rows)
    columns = range(late.columns.stop)
    out = late.entries.new_zeros(len(late.entries), len(rows), len(columns))
    out[:, :, late.columns.start : late.columns.stop] = late.entries
    _add_early_columns(out, recurrence, left, band, rows)
    return Strip(out, rows, columns)


def _late_columns(recurrence: Fading, left: Tensor, band: Band, rows: range) -> Strip:
    """Return the columns j with j + max(band) >= rows.start, computed by the tree."""
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
    """Add the columns j with j + max(band) < rows.start, computed from the pivot's state."""
    batch, tokens, *_ = recurrence.shape
    last = max(band)
    order = recurrence.by_memory(slice(rows.start))
    # factors, by the number of tokens between their write and the last write to a column
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
            latest = some_times.start - 1  # token that wrote to the columns that are left
            if latest >= times.start and _all_forgotten(fades, latest, out.dtype):
                break


def _all_forgotten(fades: Fades, token: int, dtype: torch.dtype) -> bool:
    """Return True if decays make the state after ``token`` negligible at the pivot."""
    return bool(fades(slice(token, token + 1)).amax() <= forgotten(dtype))


def _at_pivot(values: Band, recurrence: Fading, fades: Fades, times: range, heads: Heads) -> Tensor:
    """Return the module's Y[m], for m in ``times``, times the decays to the pivot, (B, T, N, H)."""
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
    """Return the sum or product of x over the steps between the pivot and each token, in float64.

    The steps between a token t and a later token t' are the steps t + 1 to t'.

    Args:
        x: one value per step and head (B, T, H).
        pivot: index of the pivot token.
        product: whether to multiply the steps; they are added otherwise.
    """
    after = _accumulated(x[:, pivot + 1 :], product)
    before = _accumulated(x[:, 1 : pivot + 1].flip(1), product).flip(1)
    here = doubled(torch.full_like(x[:, :1], float(product)))
    return torch.cat([before, here, after], 1)


def _accumulated(x: Tensor, product: bool) -> Tensor:
    """Return x[0] + ... + x[t], or x[0] * ... * x[t], for each token t (B, T, H), in float64.

    A loop over the positions in a run accumulates all runs in parallel; then each run adds, or
    multiplies by, the total of the runs before it.
    """
    tokens = x.shape[1]
    # padded without effect, and by a whole run more: there may be no tokens
    padding = (0, 0, 0, -tokens % _RUN + _RUN)
    padded = F.pad(doubled(x), padding, value=float(product))
    runs = padded.view(len(x), -1, _RUN, x.shape[2])
    for i in range(1, _RUN):
        _join(runs[:, :, i], runs[:, :, i - 1], product)
    ends = runs[:, :-1, -1]  # the total of each run except the last
    ends = ends.cumprod(1) if product else ends.cumsum(1)
    _join(runs[:, 1:], ends[:, :, None], product)
    return padded[:, :tokens]


def _join(into: Tensor, x: Tensor, product: bool) -> None:
    """Multiply ``into`` by x in place if ``product``; add x to ``into`` otherwise."""
    if product:
        into *= x
    else:
        into += x
