"""Heads whose matrices are recurrences, computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .chunk_tree import chunks_up_to, matrices, sum_over_heads, sums_over_channels, weighted
from .chunks import Chunk, mapped
from .heads import HeadOperator
from .recurrent import Recurrent


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

    def _forward(self, v: Tensor) -> Tensor:
        return mapped(self.chunk, v, transposed=False)

    def _adjoint(self, u: Tensor) -> Tensor:
        return mapped(self.chunk, u, transposed=True)
