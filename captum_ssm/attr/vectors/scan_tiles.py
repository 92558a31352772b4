"""The matrices of selective scans, for each channel, computed in tiles of a few columns.

A source token writes one state per channel, and a later row depends on this state only through
decay.  So a tile far from the diagonal is a product of two thin factors:

    alpha_c[i, j] = sum over n of (C[i, n] exp(A[c, n] sum of dt[p+1..i, c])) state_j[p, c, n]

for any token p between j and i, the *pivot* (hidden-attention paper, eq. 14).  Rows *near* the
sources (in the reach of the short convolution) are computed by the scan.  No exponent is positive.

A backward scan is a scan of the tokens in reverse order.  Its matrix and a forward scan's overlap
only in the rows of the sources.  In shapes, S counts sources, T tokens from the first source on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.kernels.arithmetic import BINARY, doubled, sum_tensors
from ...operators.kernels.portions import as_memory_allows, at_a_time, parts
from ...operators.recurrences.selective_scan import SelectiveScan

#: Largest number of sources with states in memory, and of elements of a tile (4 MiB in float32).
_SOURCES = 32
_TILE_ELEMENTS = 2**20
#: On a GPU, the number of tokens (sources and near rows) whose matrices are computed at a time.
_TOKENS_LAUNCHED = 64


class ScanTile(NamedTuple):
    """Some rows and columns of the matrices of all channels.

    Attributes:
        rows: a slice of the requested positions.
        sources: a slice of the tokens, the columns.
        entries: matrix entries (B, rows, sources, H).
    """

    rows: slice
    sources: slice
    entries: Tensor


class ScanRows:
    """The matrix of each channel, the product ``outer (scan + skip) shares``.

    Args:
        scan: the scan, with ``b`` and ``c`` common to all heads.
        shares: for each lag k >= 0, the scan's input at token t due to token t - k, (B, L, H).
        outer: diagonal factors after the scan, (B, L, H).
        skip: diagonal factors added to the scan, broadcastable to (B, L, H).
    """

    def __init__(
        self, scan: SelectiveScan, shares: Mapping[int, Tensor], outer: Tensor, skip: Tensor
    ) -> None:
        self._scan = scan
        self._shares = shares
        self._outer = outer
        self._skip = skip.expand(outer.shape)
        # sums of dt, in float64: differences of these sums would cancel in float32
        self._clock = doubled(scan.dt).cumsum(1)
        self._reach = max(shares)
        self.shape = scan.shape
        sources_on_gpu = max(_SOURCES, _TOKENS_LAUNCHED - self._reach)
        #: The number of sources computed at a time.
        self.width = at_a_time(_SOURCES, scan.device, sources_on_gpu)

    @property
    def device(self) -> torch.device:
        """The device of the scan's coefficients."""
        return self._scan.device

    def columns(self, sources: slice) -> Columns:
        """Return the columns of some sources, from which any of their rows can be computed."""
        end = min(sources.stop + self._reach, self.shape.tokens)
        near, states = self._near_entries(sources, end), self._states_after(sources, end)
        return Columns(self, sources.start, end, near, states)

    def entries_after(self, states: Tensor, pivot: int, rows: Tensor) -> Tensor:
        """Return matrix entries (B, rows, S, H) of rows after ``pivot``, from the states there.

        outer[i] sum over n of (C[i, n] exp(A[n] (clock[i] - clock[pivot])) state[n, j])
        """
        scan = self._scan
        elapsed = (self._clock[:, rows] - self._clock[:, pivot, None]).to(states)
        rates = BINARY * scan.a[:, None]  # BINARY: exp2 in place of exp
        factors = (elapsed.transpose(1, 2)[..., None] * rates).exp2_()  # (B, H, rows, N)
        factors *= scan.c[:, None, rows]
        factors *= self._outer[:, rows].transpose(1, 2)[..., None]
        entries = factors @ states  # (B, H, rows, S)
        return entries.permute(0, 2, 3, 1)

    def _near_entries(self, sources: slice, end: int) -> Tensor:
        """Return entries (B, T, S, H) of the rows from the first source to token ``end - 1``."""
        part, tokens = slice(sources.start, end), end - sources.start
        outer, skip = self._outer[:, part], self._skip[:, part]
        shares = {k: share[:, part] for k, share in self._shares.items() if k < tokens}
        width = sources.stop - sources.start
        if not shares:  # all lags are beyond the end of the sequence
            return outer.new_zeros(*outer.shape[:2], width, outer.shape[2])
        band = {lag: share[..., None] for lag, share in shares.items()}
        cut = self._scan.cut(part).entries(outer[..., None], band, range(tokens), by_head=True)
        matrix = cut.full(tokens)  # (B, H, T, T)
        for lag, share in shares.items():
            skipped = (outer * skip * share)[:, lag:].transpose(1, 2)
            matrix.diagonal(-lag, 2, 3).add_(skipped)
        return matrix[..., :width].permute(0, 2, 3, 1)

    def _states_after(self, sources: slice, end: int) -> Tensor:
        """Return the states after token ``end - 1`` that each source j writes, (B, H, N, S).

        Sum over lags k, at t = j + k, of exp(A (clock[end - 1] - clock[t])) dt[t] B[t] share[k][t]
        """
        scan, width = self._scan, sources.stop - sources.start
        batch, _, heads, _ = scan.shape
        states = self._outer.new_zeros(batch, width, scan.a.shape[-1], heads)
        rates = BINARY * scan.a.T
        for lag, share in self._shares.items():
            # the tokens t at which sources enter the scan with this lag
            tokens = slice(sources.start + lag, min(sources.stop + lag, end))
            if (count := tokens.stop - tokens.start) <= 0:
                continue
            elapsed = (self._clock[:, end - 1, None] - self._clock[:, tokens]).to(states)
            decay = (elapsed[:, :, None] * rates).exp2_()  # (B, S, N, H)
            added = (scan.dt[:, tokens] * share[:, tokens])[:, :, None]
            states[:, :count].addcmul_(decay, scan.b[:, tokens, :, None] * added)
        return states.permute(0, 3, 2, 1)


class Columns(NamedTuple):
    """The matrix columns of S sources: entries of near rows, and states to compute later rows.

    Attributes:
        rows: the matrix that has these columns.
        start: the first source.
        end: the first token behind the sources and the reach of the short convolution.
        near: entries of rows start .. end - 1, (B, T, S, H).
        states: the states after token end - 1, (B, H, N, S).
    """

    rows: ScanRows
    start: int
    end: int
    near: Tensor
    states: Tensor

    def entries_of(self, rows: Tensor) -> Tensor:
        """Return entries (B, rows, S, H) of ``rows``, all before ``end`` or all from ``end`` on."""
        if int(rows.max()) < self.end:
            return self.near[:, rows - self.start]
        return self.rows.entries_after(self.states, self.end - 1, rows)


def tiles(ahead: ScanRows, back: ScanRows | None, positions: Sequence[int]) -> Iterator[ScanTile]:
    """Yield the matrix rows at some positions in tiles; columns of zeros may be missing.

    Args:
        ahead: the matrix of a forward scan.
        back: the matrix of a backward scan (tokens in reverse order) to add, or None.
        positions: the positions of the rows, ascending.
    """
    batch, tokens, heads, _ = ahead.shape
    rows = torch.as_tensor(positions)
    elements, width = at_a_time(_TILE_ELEMENTS, ahead.device), ahead.width
    rows_at_once = max(1, elements // (batch * heads * width))
    for sources in parts(tokens, width, backwards=False):
        # the number of rows before the first source, and up to the last
        first_at, first_after = (int((rows < at).sum()) for at in (sources.start, sources.stop))
        # each range between two cuts is a tile: rows far before, near before, at, near after and
        # far after the sources; those before only with a backward scan
        cuts, forward, backward = [first_at, first_after], None, None
        if first_at < len(rows):
            forward = ahead.columns(sources)
            cuts += [max(first_after, int((rows < forward.end).sum())), len(rows)]
        if back is not None and first_after > 0:
            backward = back.columns(slice(tokens - sources.stop, tokens - sources.start))
            cuts = [0, min(first_at, int((rows < tokens - backward.end).sum())), *cuts]
        tile = partial(_tile, rows, sources, forward, backward)
        for start, stop in pairwise(cuts):
            yield from as_memory_allows(range(start, stop), rows_at_once, tile)


def _tile(
    all_rows: Tensor, sources: slice, ahead: Columns | None, back: Columns | None, span: range
) -> ScanTile:
    """Return the tile of the rows ``all_rows[span]``, with both scan directions added."""
    rows, source_stop, summands = all_rows[span.start : span.stop], sources.stop, []
    if ahead is not None and rows[0] >= sources.start:
        summands.append(ahead.entries_of(rows))
        if back is None:  # the scan is causal: later sources do not reach these rows
            source_stop = min(source_stop, int(rows[-1]) + 1)
    if back is not None and rows[0] < sources.stop:
        # in reverse order token t is L - 1 - t; flip(2) restores the order of the sources
        summands.append(back.entries_of(back.rows.shape.tokens - 1 - rows).flip(2))
    entries = sum_tensors(summands)[:, :, : source_stop - sources.start]
    return ScanTile(slice(span.start, span.stop), slice(sources.start, source_stop), entries)
