"""All rows of selective scans, channel by channel, in tiles of a few columns.

What a source token wrote is one state per channel, and a row behind it reads that state through
its decay alone, so that a tile far from the diagonal is a product of two thin factors:

    alpha_c[i, j] = sum over n of (C[i, n] exp(A[c, n] sum of dt[p+1..i, c])) state_j[p, c, n]

for any token p between j and i (hidden-attention paper, eq. 14).  Around the diagonal the states
are made, token by token.  No exponent is positive.

A scan that runs backwards is one of the tokens in reverse order; where another runs forwards, they
have nothing but the sources' own rows in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.arithmetic import BINARY, doubled, sum_tensors
from ..kernels.portions import as_memory_allows, at_a_time, parts
from ..recurrences.selective_scan import SelectiveScan

#: Sources whose states are held at a time, and elements of a tile (4 MiB in float32).
_SOURCES = 32
_TILE_ELEMENTS = 2**20
#: Tokens whose matrices are made where launches cost more: sources, and those that reach them.
_TOKENS_LAUNCHED = 64


class ScanTile(NamedTuple):
    """Some rows from a range of sources.

    Attributes:
        rows: which of the positions asked for.
        sources: which tokens.
        entries: what reaches the rows from each source, (B, rows, sources, H).
    """

    rows: slice
    sources: slice
    entries: Tensor


class ScanRows:
    """Rows of front (scan + skip) applied to what each source token sends.

    Args:
        scan: the scan, whose B and C are common to all heads.
        shares: what source t - k sends to token t, (B, L, H) by lag k, none of them negative.
        front: factors behind the scan, (B, L, H).
        skip: factors beside the scan, (B, L, H), broadcastable.
    """

    def __init__(
        self, scan: SelectiveScan, shares: Mapping[int, Tensor], front: Tensor, skip: Tensor
    ) -> None:
        self._scan = scan
        self._shares = shares
        self._front = front
        self._skip = skip.expand(front.shape)
        # differences of it are taken, which cancel in float32
        self._clock = doubled(scan.dt).cumsum(1)
        self._reach = max(shares)
        batch, _, heads, _ = self.shape = scan.shape
        launched = max(_SOURCES, _TOKENS_LAUNCHED - self._reach)
        #: How many sources are taken at a time.
        self.width = at_a_time(_SOURCES, scan.device, launched)
        self._outputs: Tensor | None = None
        if scan.device.type == "cpu":
            self._outputs = front.new_empty(batch, _SOURCES + self._reach, _SOURCES, heads)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._scan.device

    def sent(self, sources: slice) -> Sent:
        """What some tokens send to those behind them; valid until this is asked for again."""
        end = min(sources.stop + self._reach, self.shape.tokens)
        if self._outputs is None:
            near, states = self._near(sources, end), self._left(sources, end)
        else:
            states = self._made(sources, end, self._outputs)
            near = self._outputs[:, : end - sources.start, : sources.stop - sources.start]
        return Sent(self, sources.start, end, near, states)

    def read(self, states: Tensor, pivot: int, rows: Tensor) -> Tensor:
        """What rows after ``pivot`` read of the states (B, H, N, S) there, (B, rows, S, H)."""
        scan = self._scan
        elapsed = (self._clock[:, rows] - self._clock[:, pivot, None]).to(states)
        rates = BINARY * scan.a[:, None]
        factors = (elapsed.transpose(1, 2)[..., None] * rates).exp2_()  # (B, H, rows, N)
        factors *= scan.c[:, None, rows]
        factors *= self._front[:, rows].transpose(1, 2)[..., None]
        entries = factors @ states  # (B, H, rows, S)
        return entries.permute(0, 2, 3, 1)

    def _made(self, sources: slice, end: int, outputs: Tensor) -> Tensor:
        """The states (B, H, N, S) left before ``end``; what is read until then to ``outputs``."""
        scan, start = self._scan, sources.start
        batch, _, heads, _ = scan.shape
        width = sources.stop - start
        states = self._front.new_zeros(batch, width, scan.a.shape[-1], heads)
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
            out *= self._front[:, t, None]
        return states.permute(0, 3, 2, 1).contiguous()

    # The same two where a launch for each token would cost more than all its arithmetic.

    def _near(self, sources: slice, end: int) -> Tensor:
        """What is read until ``end``, (B, T, S, H), by the matrices of these tokens alone."""
        some, tokens = slice(sources.start, end), end - sources.start
        front, skip = self._front[:, some], self._skip[:, some]
        shares = {k: share[:, some] for k, share in self._shares.items() if k < tokens}
        width = sources.stop - sources.start
        if not shares:
            return front.new_zeros(*front.shape[:2], width, front.shape[2])
        band = {lag: share[..., None] for lag, share in shares.items()}
        read = self._scan.cut(some).heads_of_product(front[..., None], band)  # (B, H, T, T)
        for lag, share in shares.items():
            beside = (front * skip * share)[:, lag:].transpose(1, 2)
            read.diagonal(-lag, 2, 3).add_(beside)
        return read[..., :width].permute(0, 2, 3, 1)

    def _left(self, sources: slice, end: int) -> Tensor:
        """The states (B, H, N, S) left before ``end``, each by its decay since it was written."""
        scan, width = self._scan, sources.stop - sources.start
        batch, _, heads, _ = scan.shape
        states = self._front.new_zeros(batch, width, scan.a.shape[-1], heads)
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


class Sent(NamedTuple):
    """What S sources send to the tokens from the first of them on.

    Attributes:
        rows: whose they are.
        start: the first source.
        end: where the last of them has sent all it sends.
        near: what the tokens until then take of it, (B, T, S, H).
        states: what is left for all others, (B, H, N, S).
    """

    rows: ScanRows
    start: int
    end: int
    near: Tensor
    states: Tensor

    def to(self, tokens: Tensor) -> Tensor:
        """What tokens take of it (B, T, S, H), all of them before ``end``, or none."""
        if int(tokens.max()) < self.end:
            return self.near[:, tokens - self.start]
        return self.rows.read(self.states, self.end - 1, tokens)


def tiles(ahead: ScanRows, back: ScanRows | None, positions: Sequence[int]) -> Iterator[ScanTile]:
    """The rows at some positions, tile by tile; zeros may be left out.

    Args:
        ahead: a scan.
        back: another one, of the tokens in reverse order, to be added; None for none.
        positions: of the rows, ascending.
    """
    batch, tokens, heads, _ = ahead.shape
    asked = torch.as_tensor(positions)
    most, width = at_a_time(_TILE_ELEMENTS, ahead.device), ahead.width
    count = max(1, most // (batch * heads * width))
    for sources in parts(tokens, width, backwards=False):
        first, behind = (int((asked < at).sum()) for at in (sources.start, sources.stop))
        # of rows before the sources, far and near, of their own, and of those behind, near and far
        edges, sent, returned = [first, behind], None, None
        if first < len(asked):
            sent = ahead.sent(sources)
            edges += [max(behind, int((asked < sent.end).sum())), len(asked)]
        if back is not None and behind > 0:
            returned = back.sent(slice(tokens - sources.stop, tokens - sources.start))
            edges = [0, min(first, int((asked < tokens - returned.end).sum())), *edges]
        tile = partial(_tile, asked, sources, sent, returned)
        for start, stop in pairwise(edges):
            yield from as_memory_allows(range(start, stop), count, tile)


def _tile(
    asked: Tensor, sources: slice, sent: Sent | None, returned: Sent | None, some: range
) -> ScanTile:
    """Some of the rows asked for, all on one side of the sources or their own."""
    rows, until, found = asked[some.start : some.stop], sources.stop, []
    if sent is not None and rows[0] >= sources.start:
        found.append(sent.to(rows))
        if returned is None:  # those behind the last of the rows send nothing to them
            until = min(until, int(rows[-1]) + 1)
    if returned is not None and rows[0] < sources.stop:
        found.append(returned.to(returned.rows.shape.tokens - 1 - rows).flip(2))
    entries = sum_tensors(found)[:, :, : until - sources.start]
    return ScanTile(slice(some.start, some.stop), slice(sources.start, until), entries)
