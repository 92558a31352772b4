"""All rows of selective scans, channel by channel, in tiles of a few columns.

A source token writes one state per channel, and a later row reads that state through its decay
alone.  So a tile far from the diagonal is a product of two thin factors:

    alpha_c[i, j] = sum over n of (C[i, n] exp(A[c, n] sum of dt[p+1..i, c])) state_j[p, c, n]

for any token p between j and i, the *pivot* (hidden-attention paper, eq. 14).  Rows *near* the
sources, which some of them still send to, are made another way.  No exponent is positive.

A scan that runs backwards is one of the tokens in reverse order.  With one that runs forwards it
has only the sources' own rows in common.  Shapes: S sources, T tokens from the first source on.
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

#: Sources whose states are held at a time, and elements of a tile (4 MiB in float32).
_SOURCES = 32
_TILE_ELEMENTS = 2**20
#: Tokens whose matrices are made where launches cost more: sources, and those that reach them.
_TOKENS_LAUNCHED = 64


class ScanTile(NamedTuple):
    """Some rows and columns of the matrices of all channels.

    Attributes:
        rows: which of the positions.
        sources: which tokens are the columns.
        entries: (B, rows, sources, H).
    """

    rows: slice
    sources: slice
    entries: Tensor


class ScanRows:
    """Rows of outer (scan + skip) shares, channel by channel.

    Args:
        scan: the scan, whose B and C are common to all heads.
        shares: share of source t - k in the scan's input at token t, (B, L, H) by lag k >= 0.
        outer: factors that act after the scan, (B, L, H).
        skip: factors added to the scan, (B, L, H), broadcastable.
    """

    def __init__(
        self, scan: SelectiveScan, shares: Mapping[int, Tensor], outer: Tensor, skip: Tensor
    ) -> None:
        self._scan = scan
        self._shares = shares
        self._outer = outer
        self._skip = skip.expand(outer.shape)
        # in float64: differences of these sums would cancel in float32
        self._clock = doubled(scan.dt).cumsum(1)
        self._reach = max(shares)
        batch, _, heads, _ = self.shape = scan.shape
        launched = max(_SOURCES, _TOKENS_LAUNCHED - self._reach)
        #: How many sources are taken at a time.
        self.width = at_a_time(_SOURCES, scan.device, launched)
        #: Output of :meth:`_run`; None where it would take a launch for each token.
        self._outputs: Tensor | None = None
        if scan.device.type == "cpu":
            self._outputs = outer.new_empty(batch, _SOURCES + self._reach, _SOURCES, heads)

    @property
    def device(self) -> torch.device:
        """Where the coefficients are."""
        return self._scan.device

    def columns(self, sources: slice) -> Columns:
        """Return the columns of some sources; the next call overwrites them."""
        end = min(sources.stop + self._reach, self.shape.tokens)
        if self._outputs is None:
            near, states = self._near_by_matrix(sources, end), self._states_by_decay(sources, end)
        else:
            states = self._run(sources, end, self._outputs)
            near = self._outputs[:, : end - sources.start, : sources.stop - sources.start]
        return Columns(self, sources.start, end, near, states)

    def read(self, states: Tensor, pivot: int, rows: Tensor) -> Tensor:
        """Entries (B, rows, S, H) of rows after ``pivot``, given the states (B, H, N, S) there."""
        scan = self._scan
        elapsed = (self._clock[:, rows] - self._clock[:, pivot, None]).to(states)
        rates = BINARY * scan.a[:, None]
        factors = (elapsed.transpose(1, 2)[..., None] * rates).exp2_()  # (B, H, rows, N)
        factors *= scan.c[:, None, rows]
        factors *= self._outer[:, rows].transpose(1, 2)[..., None]
        entries = factors @ states  # (B, H, rows, S)
        return entries.permute(0, 2, 3, 1)

    def _run(self, sources: slice, end: int, outputs: Tensor) -> Tensor:
        """Run the scan on each source alone, token by token up to ``end``.

        Returns:
            The states after the last token (B, H, N, S); ``outputs`` (B, T, S, H) is written to.
        """
        scan, start = self._scan, sources.start
        batch, _, heads, _ = scan.shape
        width = sources.stop - start
        states = self._outer.new_zeros(batch, width, scan.a.shape[-1], heads)
        rates = BINARY * scan.a.T[None]  # (1, N, H)
        for t in range(start, end):
            count = min(t - start + 1, width)  # sources that have sent something
            begun, out = states[:, :count], outputs[:, t - start]
            begun *= (scan.dt[:, t, None] * rates).exp2_()[:, None]
            out.zero_()
            for lag, share in self._shares.items():
                if 0 <= (source := t - lag - start) < width:
                    sent = share[:, t]  # (B, H)
                    begun[:, source] += scan.b[:, t, :, None] * (scan.dt[:, t] * sent)[:, None]
                    out[:, source] += self._skip[:, t] * sent
            out[:, :count] += (scan.c[:, t, None, None] @ begun).squeeze(2)
            out *= self._outer[:, t, None]
        return states.permute(0, 3, 2, 1).contiguous()

    # Outputs and states of _run, where a launch for each token would cost more than its arithmetic.

    def _near_by_matrix(self, sources: slice, end: int) -> Tensor:
        """Outputs (B, T, S, H) up to ``end``: outer (scan + skip) shares of these T tokens."""
        some, tokens = slice(sources.start, end), end - sources.start
        outer, skip = self._outer[:, some], self._skip[:, some]
        shares = {k: share[:, some] for k, share in self._shares.items() if k < tokens}
        width = sources.stop - sources.start
        if not shares:
            return outer.new_zeros(*outer.shape[:2], width, outer.shape[2])
        band = {lag: share[..., None] for lag, share in shares.items()}
        cut = self._scan.cut(some).entries(outer[..., None], band, range(tokens), by_head=True)
        matrix = cut.full(tokens)  # (B, H, T, T)
        for lag, share in shares.items():
            skipped = (outer * skip * share)[:, lag:].transpose(1, 2)
            matrix.diagonal(-lag, 2, 3).add_(skipped)
        return matrix[..., :width].permute(0, 2, 3, 1)

    def _states_by_decay(self, sources: slice, end: int) -> Tensor:
        """States (B, H, N, S) after ``end - 1``, each from its decay since it was written."""
        scan, width = self._scan, sources.stop - sources.start
        batch, _, heads, _ = scan.shape
        states = self._outer.new_zeros(batch, width, scan.a.shape[-1], heads)
        rates = BINARY * scan.a.T
        for lag, share in self._shares.items():
            at = slice(sources.start + lag, min(sources.stop + lag, end))
            if (count := at.stop - at.start) <= 0:
                continue
            elapsed = (self._clock[:, end - 1, None] - self._clock[:, at]).to(states)
            decay = (elapsed[:, :, None] * rates).exp2_()  # (B, S, N, H)
            written = (scan.dt[:, at] * share[:, at])[:, :, None]
            states[:, :count].addcmul_(decay, scan.b[:, at, :, None] * written)
        return states.permute(0, 3, 2, 1)


class Columns(NamedTuple):
    """The columns of S sources, from the first of them on: near rows, and states for later ones.

    Attributes:
        rows: the rows they belong to.
        start: the first source.
        end: the first token that no source sends to directly.
        near: entries of the tokens start .. end - 1, (B, T, S, H).
        states: the states after the last of these, (B, H, N, S).
    """

    rows: ScanRows
    start: int
    end: int
    near: Tensor
    states: Tensor

    def to(self, tokens: Tensor) -> Tensor:
        """Entries (B, rows, S, H) of rows ``tokens``, all of them before ``end`` or none."""
        if int(tokens.max()) < self.end:
            return self.near[:, tokens - self.start]
        return self.rows.read(self.states, self.end - 1, tokens)


def tiles(ahead: ScanRows, back: ScanRows | None, positions: Sequence[int]) -> Iterator[ScanTile]:
    """Yield the rows at some positions, tile by tile; zeros may be left out.

    Args:
        ahead: a scan from the first token to the last.
        back: a second scan, of the tokens in reverse order, to be added; None for none.
        positions: of the rows, ascending.
    """
    batch, tokens, heads, _ = ahead.shape
    rows = torch.as_tensor(positions)
    most, width = at_a_time(_TILE_ELEMENTS, ahead.device), ahead.width
    count = max(1, most // (batch * heads * width))
    for sources in parts(tokens, width, backwards=False):
        first, later = (int((rows < at).sum()) for at in (sources.start, sources.stop))
        # cuts between rows far before the sources, near before, their own, near after, far after
        cuts, sent, returned = [first, later], None, None
        if first < len(rows):
            sent = ahead.columns(sources)
            cuts += [max(later, int((rows < sent.end).sum())), len(rows)]
        if back is not None and later > 0:
            returned = back.columns(slice(tokens - sources.stop, tokens - sources.start))
            cuts = [0, min(first, int((rows < tokens - returned.end).sum())), *cuts]
        tile = partial(_tile, rows, sources, sent, returned)
        for start, stop in pairwise(cuts):
            yield from as_memory_allows(range(start, stop), count, tile)


def _tile(
    positions: Tensor, sources: slice, sent: Columns | None, returned: Columns | None, some: range
) -> ScanTile:
    """Return the tile of some of the rows, all between two of the cuts of :func:`tiles`."""
    rows, until, found = positions[some.start : some.stop], sources.stop, []
    if sent is not None and rows[0] >= sources.start:
        found.append(sent.to(rows))
        if returned is None:  # sources after the last of the rows send nothing to them
            until = min(until, int(rows[-1]) + 1)
    if returned is not None and rows[0] < sources.stop:
        found.append(returned.to(returned.rows.shape.tokens - 1 - rows).flip(2))
    entries = sum_tensors(found)[:, :, : until - sources.start]
    return ScanTile(slice(some.start, some.stop), slice(sources.start, until), entries)
