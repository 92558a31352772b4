"""Heads whose matrices are recurrences, computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .band import Band
from .chunk_tree import chunks_up_to, matrices, sum_over_heads, sums_over_channels, weighted
from .chunks import CHUNK, Chunk, ChunkSteps, Steps, in_steps, mapped
from .heads import HeadOperator, common_to_channels
from .maps import full_precision
from .recurrent import Recurrent
from .streams import LARGE, Portion, Stream
from .strips import Strip, total
from .underflow import underflow_flushed


class ChunkedHeads(Recurrent, HeadOperator):
    """Base of operators that say what chunks of tokens read, write and carry on."""

    def chunk(self, part: slice, length: int) -> Chunk:
        """The recurrence over some tokens in a row, in chunks.

        Args:
            part: the tokens: of whole chunks, or of one that is shorter.
            length: tokens of a whole chunk.
        """
        raise NotImplementedError

    def head_matrices(self) -> Tensor:
        batch, tokens, heads, _ = self.shape
        out = self._zeros(batch, heads, tokens, tokens)
        return matrices(self._chunks_up_to(range(tokens)), out)

    def strip_of_product(self, left: Tensor, band: Band, rows: range) -> Strip:
        left, *rights = (x.expand(self.shape) for x in (left, *band.values()))
        if any(common_to_channels(left, x, self.shape) is not None for x in rights):
            return super().strip_of_product(left, band, rows)
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            sums = self._sums_of_channels(left, rights, rows)
        strips = (Strip(entries, rows, range(rows.stop)) for entries in sums)
        tokens = self.shape.tokens
        shares = (x.moved(0, -lag, tokens) for lag, x in zip(band, strips, strict=True))
        return total(shares, rows)

    def _sum_of_heads(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        left, right = (x.transpose(1, 2)[..., None] for x in (left, right))  # (B, H, L, 1)
        chunks = [weighted(chunk, left, right) for chunk in self._chunks_up_to(rows)]
        return sum_over_heads(chunks, self._zeros(self.shape.batch, len(rows), rows.stop))

    def _sum_of_channels(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        return self._sums_of_channels(left, [right], rows)[0]

    def _sums_of_channels(self, left: Tensor, rights: Sequence[Tensor], rows: range) -> Tensor:
        """The sum over channels for each of several column factors, which share the matrices."""
        left, *rights = (x.transpose(1, 2) for x in (left, *rights))  # (B, H, L, P)
        out = self._zeros(len(rights), self.shape.batch, len(rows), rows.stop)
        return sums_over_channels(self._chunks_up_to(rows), left, rights, out)

    def _chunks_up_to(self, rows: range) -> list[Chunk]:
        return chunks_up_to(self.chunk, rows, self.shape.batch * self.shape.heads)

    def stream(self, transposed: bool, longest: int) -> Stream | None:
        if self._example().is_cuda:  # a few chunks at a time would take more launches than work
            return None
        steps = self._steps(CHUNK, transposed)
        return lambda x, part: in_steps(steps, x, part, CHUNK, transposed)

    @property
    def portion(self) -> Portion:
        return LARGE._replace(multiple=CHUNK)

    def _forward(self, v: Tensor) -> Tensor:
        return mapped(self._steps, v, transposed=False)

    def _adjoint(self, u: Tensor) -> Tensor:
        return mapped(self._steps, u, transposed=True)

    def _steps(self, length: int, transposed: bool) -> Steps:
        """The map, or its adjoint, in chunks of so many tokens."""
        return ChunkSteps(self.chunk, length, transposed)
