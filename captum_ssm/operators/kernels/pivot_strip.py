"""Strips of recurrences whose states fade independently of each other, cut at a pivot.

    alpha_c[i, j] = sum over n of query[i, n] (product of fade[t, n, c] over j < t <= i) key[j, n]

Whatever reaches a strip from further back passes the last token before it, the pivot, so that the
entries there are one matrix product: of what the rows read of the pivot's state, and of what is
left in it of what the columns wrote.  Both hold products of fades up to the pivot alone, found from
sums of steps in one pass, which for strips of few rows costs less than the tree of
:mod:`.pivot_tree`.  The tree does the tokens of the strip itself.

A band that acts before the recurrence has written all of column j by the time m = j + last, where
last is its largest lag; from then on it fades like anything else.  So the columns of the product
are, with t = m - last + lag,

    Y[m] = sum over lags of (product of fade[s] over t < s <= m) key[t] band_lag[t]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Shape
from .bands import Band
from .pivot_tree import forgotten
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
#: Neighbouring heads, or the indices (h,) of any.
Heads: TypeAlias = slice | Tensor


class Fading(Protocol):
    """What a recurrence offers to be cut."""

    shape: Shape  # B, L, H, 1

    def cut(self, tokens: slice) -> Fading:
        """The recurrence over neighbouring tokens alone."""

    def strip_of_product(self, left: Tensor, band: Band, rows: range) -> Strip:
        """As of any operator; by the tree where few tokens come before the rows."""

    def by_memory(self, tokens: slice) -> Tensor:
        """Heads (H,), in an order in which neighbours forget alike."""

    def fades(self, token: int, tokens: int, heads: Heads) -> Fades:
        """Products of fades between a token and all of the first ``tokens``."""

    def queries(self, tokens: slice, heads: Heads) -> Tensor:
        """What tokens read of the state, (B, T, N, 1 or H)."""

    def keys(self, tokens: slice, heads: Heads) -> Tensor:
        """What tokens write to, (B, T, N, 1 or H)."""

    def written(self, right: Tensor) -> Tensor:
        """How much is written of values (B, L, H), broadcastable."""


def strip_by_pivot(operator: Fading, left: Tensor, band: Band, rows: range) -> Strip:
    """``strip_of_product`` of any operator, for a recurrence and rows that begin after others.

    Args:
        operator: the recurrence.
        left: row factors (B, L, H, 1), broadcastable.
        band: what acts before it, column factors (B, L, H, 1), broadcastable, by lag.
        rows: neighbouring rows, ascending; the first is not the first token's.
    """
    near = _own_tokens(operator, left, band, rows)
    columns = range(near.columns.stop)
    out = near.entries.new_zeros(len(near.entries), len(rows), len(columns))
    out[:, :, near.columns.start : near.columns.stop] = near.entries
    _add_earlier(out, operator, left, band, rows)
    return Strip(out, rows, columns)


def _own_tokens(operator: Fading, left: Tensor, band: Band, rows: range) -> Strip:
    """The columns that are wholly written no earlier than the rows begin."""
    first, last = min(band), max(band)
    tokens = operator.shape.tokens
    start = max(0, rows.start - max(last, last - first))
    part = slice(start, min(tokens, rows.stop - min(0, first)))
    found = operator.cut(part).strip_of_product(
        left.expand(operator.shape)[:, part],
        {lag: factor.expand(operator.shape)[:, part] for lag, factor in band.items()},
        range(rows.start - start, rows.stop - start),
    )
    begin = max(0, min(tokens, rows.start - last))
    columns = range(begin, max(begin, found.columns.stop + start))
    kept = found.entries[:, :, len(found.columns) - len(columns) :]
    return Strip(kept, rows, columns)


def _add_earlier(out: Tensor, operator: Fading, left: Tensor, band: Band, rows: range) -> None:
    """Add the columns that are wholly written before the rows begin."""
    batch, tokens, *_ = operator.shape
    last = max(band)
    order = operator.by_memory(slice(rows.start))
    # by how long before the time of writing all of a column each is written
    written = {
        last - lag: picked(operator.written(factor.expand(operator.shape).squeeze(-1)), order)
        for lag, factor in band.items()
    }
    times = range(max(0, last), min(rows.start, tokens + last))
    states = operator.keys(slice(1), slice(1)).shape[2]
    longest = batch * max(len(rows), min(_COLUMNS, rows.start))
    size = max(1, _ELEMENTS // (longest * states))
    here = slice(rows.start, rows.stop)
    row = picked(left.expand(operator.shape)[:, here, :, 0], order)[:, :, None]
    for start in range(0, len(order), size):
        part = slice(start, start + size)
        some = order[part]
        fades = operator.fades(rows.start - 1, rows.stop, some)
        read = fades(here).mul_(operator.queries(here, some)).mul_(row[..., part])
        values = {back: factor[:, :, part] for back, factor in written.items()}
        for stop in range(times.stop, times.start, -_COLUMNS):
            some_times = range(max(times.start, stop - _COLUMNS), stop)
            columns = _left_of(values, operator, fades, some_times, some)
            into = out[:, :, some_times.start - last : some_times.stop - last]
            into.baddbmm_(read.flatten(2), columns.flatten(2).mT)
            first = some_times.start - max(values)
            if first > 0 and fades(slice(first, first + 1)).amax() <= forgotten(out.dtype):
                break  # and so has all that came earlier


def _left_of(values: Band, operator: Fading, fades: Fades, times: range, heads: Heads) -> Tensor:
    """What is left at the pivot of the columns wholly written at some times, (B, T, N, H)."""
    tokens = slice(max(0, times.start - max(values)), times.stop - min(values))
    keys = fades(tokens).mul_(operator.keys(tokens, heads))
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


def picked(x: Tensor, heads: Heads, out: Tensor | None = None) -> Tensor:
    """Some heads of (B, T, H).

    Args:
        x: as above.
        heads: which ones.
        out: written to. Default: None, memory of its own, or that of neighbours.
    """
    if isinstance(heads, slice):
        return x[:, :, heads] if out is None else out.copy_(x[:, :, heads])
    # several times as fast as an index along the last dimension
    return torch.gather(x, 2, heads.expand(*x.shape[:2], -1), out=out)


def from_pivot(x: Tensor, pivot: int, *, product: bool) -> Tensor:
    """Sums or products of steps (B, T, H) between a token and each other, in float64.

    Those from t to a later t' are of the steps t + 1 to t'.

    Args:
        x: the steps.
        pivot: the token.
        product: whether to multiply.
    """
    after = _accumulated(x[:, pivot + 1 :], product)
    before = _accumulated(x[:, 1 : pivot + 1].flip(1), product).flip(1)
    here = torch.full_like(x[:, :1], float(product), dtype=torch.float64)
    return torch.cat([before, here, after], 1)


def _accumulated(x: Tensor, product: bool) -> Tensor:
    """Running sums or products over tokens: within runs side by side, then from run to run."""
    tokens = x.shape[1]
    padding = (0, 0, 0, -tokens % _RUN + _RUN)
    padded = F.pad(x.to(torch.float64), padding, value=float(product))
    runs = padded.view(len(x), -1, _RUN, x.shape[2])
    for i in range(1, _RUN):
        _join(runs[:, :, i], runs[:, :, i - 1], product)
    ends = runs[:, :-1, -1]
    ends = ends.cumprod(1) if product else ends.cumsum(1)
    _join(runs[:, 1:], ends[:, :, None], product)
    return padded[:, :tokens]


def _join(into: Tensor, x: Tensor, product: bool) -> None:
    if product:
        into *= x
    else:
        into += x
