"""All rows of a selective scan, channel by channel, in tiles of a few columns.

What a source token wrote is one state per channel, and a row behind it reads that state through
its decay alone, so that a tile far from the diagonal is a product of two thin factors:

    alpha_c[i, j] = sum over n of (C[i, n] exp(A[c, n] sum of dt[p+1..i, c])) state_j[p, c, n]

for any token p between j and i (hidden-attention paper, eq. 14).  Around the diagonal the states
are made, token by token.  No exponent is positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .fitting import fitting
from .powers import BINARY
from .selective_scan import SelectiveScan

#: Sources whose states are held at a time, and elements of a tile (4 MiB in float32).
_SOURCES = 64
_TILE_ELEMENTS = 2**20


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
        self._clock = scan.dt.double().cumsum(
            1
        )  # differences of it are taken, which cancel in float32

    def tiles(self, positions: Sequence[int]) -> Iterator[ScanTile]:
        """The rows at ``positions``, which ascend, tile by tile; zeros may be left out."""
        batch, tokens, heads, _ = self._scan.shape
        asked = torch.as_tensor(positions)
        count = max(1, _TILE_ELEMENTS // (batch * heads * _SOURCES))
        reach = max(self._shares)
        outputs = self._front.new_empty(batch, _SOURCES + reach, _SOURCES, heads)
        for start in range(0, tokens, _SOURCES):
            sources = slice(start, min(start + _SOURCES, tokens))
            # where the last of the sources has sent all it sends
            end = min(sources.stop + reach, tokens)
            first, near = (int(torch.searchsorted(asked, at)) for at in (start, end))
            if first == len(asked):
                return
            states = self._made(sources, end, outputs)
            for row in range(first, near, count):
                rows = slice(row, min(row + count, near))
                places = asked[rows] - start
                # those behind the last of the rows send nothing to them
                some = slice(start, min(sources.stop, start + int(places[-1]) + 1))
                yield ScanTile(rows, some, outputs[:, places, : some.stop - start])

            def later(
                some: range, sources: slice = sources, states: Tensor = states, pivot: int = end - 1
            ) -> ScanTile:
                rows = slice(some.start, some.stop)
                return ScanTile(rows, sources, self._read(states, pivot, asked[rows]))

            yield from fitting(range(near, len(asked)), count, later)

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

    def _read(self, states: Tensor, pivot: int, rows: Tensor) -> Tensor:
        """What rows after ``pivot`` read of the states (B, H, N, S) there, (B, rows, S, H)."""
        scan = self._scan
        elapsed = (self._clock[:, rows] - self._clock[:, pivot, None]).to(states.dtype)
        rates = BINARY * scan.a[:, None]
        factors = (elapsed.transpose(1, 2)[..., None] * rates).exp2_()  # (B, H, rows, N)
        factors *= scan.c[:, None, rows]
        factors *= self._front[:, rows].transpose(1, 2)[..., None]
        entries = factors @ states  # (B, H, rows, S)
        return entries.permute(0, 2, 3, 1)
