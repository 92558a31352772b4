"""Maps and matrices of recurrences, computed from factors that write, decay and read a state.

:class:`FadingRecurrence` computes rows by trees of pivots, for states that decay independently of
each other.  :class:`ChunkedHeads` computes chunk by chunk, for heads with several value channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import Operator, Shape
from ..heads import HeadOperator, common_to_channels
from ..kernels import pivot_strip
from ..kernels.arithmetic import full_precision, linear_map, underflow_flushed
from ..kernels.bands import Band
from ..kernels.chunk_tree import (
    assemble,
    chunks_up_to,
    sum_over_heads,
    sums_over_channels,
    weigh,
)
from ..kernels.chunks import Chunk, run_all
from ..kernels.pivot_tree import BandFactors, semiseparable_strip
from ..kernels.portions import some_heads
from ..kernels.rows import Strip, sum_of_lags, sum_strips

if TYPE_CHECKING:
    from typing_extensions import Self


class Coefficients(Operator):
    """Base class of operators with one attribute per coefficient, named like the argument.

    Coefficients with roles have heads in the third dimension; coefficients listed in :attr:`fixed`
    have heads in the first.
    """

    fixed: tuple[str, ...] = ()

    @property
    def per_head(self) -> int:
        return self.shape.per_head

    def tensors(self) -> dict[str, Tensor]:
        named = ((name, getattr(self, name)) for name in (*self.roles, *self.fixed))
        return {name: x for name, x in named if x is not None}

    def at(self, coefficients: Mapping[str, Tensor]) -> Self:
        return self.changed(**coefficients)

    def select(self, heads: Sequence[int]) -> Operator:
        return self._selected(heads)

    def _selected(self, heads: Sequence[int], **others: Any) -> Self:
        """Return the operator on some heads; ``others`` are arguments for only these heads."""
        for name, x in self.tensors().items():
            if name not in others:
                others[name] = x[list(heads)] if name in self.fixed else some_heads(x, heads)
        return self.changed(**others)

    def changed(self, **arguments: Any) -> Self:
        """Return the same operator with some arguments changed."""
        code = type(self).__init__.__code__
        names = code.co_varnames[1 : code.co_argcount]
        kept = {name: getattr(self, name) for name in names if name not in arguments}
        return type(self)(**kept, **arguments)


class Recurrent(Coefficients):
    """Base class of operators whose map and adjoint are loops without an autograd graph."""

    def apply(self, v: Tensor) -> Tensor:
        return linear_map(v, self._forward, self._adjoint)

    def transpose(self, u: Tensor) -> Tensor:
        return linear_map(u, self._adjoint, self._forward)

    def _forward(self, v: Tensor) -> Tensor:
        return self._run(v, transposed=False)

    def _adjoint(self, u: Tensor) -> Tensor:
        return self._run(u, transposed=True)

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        """Return alpha x, or alpha-transposed x, for ``x`` (..., B, L, H, P)."""
        raise NotImplementedError


#: Largest number of elements of one factor of a block of the tree (1 MiB in float32).
TREE_ELEMENTS = 2**18
#: Smallest number of channels times states of a block, because smaller products are slow.
TREE_LEAST = 128
#: A band whose lags span at least this number is split into single lags.
TREE_LAGS = 16


class FadingRecurrence(Recurrent, pivot_strip.Fading):
    """Base class of recurrences whose rows :mod:`.pivot_tree` or :mod:`.pivot_strip` computes."""

    shape: Shape
    few_rows = 4

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        first, last = min(band), max(band)
        if last - first >= TREE_LAGS:

            def one(right: Tensor) -> Strip:
                return self.entries(left, {0: right}, rows, by_head)

            return sum_of_lags(one, band, rows, self.shape.tokens)
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            if by_head:
                return self._by_head(left, band, rows)
            # the pivot has to come before all tokens that the band reaches back to
            if rows.start >= pivot_strip.LEAST + max(last, last - first):
                return pivot_strip.strip_by_pivot(self, left, band, rows)
            factors = self._tree_blocks(left, band, rows)
            batch, tokens, *_ = self.shape
            return semiseparable_strip(factors, batch, tokens, rows, first)

    def _by_head(self, left: Tensor, band: Band, rows: range) -> Strip:
        """Return :meth:`entries` with ``by_head=True``, for a band with few lags."""
        raise NotImplementedError

    def _tree_blocks(self, left: Tensor, band: Band, rows: range) -> Iterator[BandFactors]:
        """Yield decays, row factors and column factors of blocks of channels and states."""
        raise NotImplementedError


class ChunkedHeads(Recurrent, HeadOperator):
    """Base class of recurrences that are computed in chunks, which :meth:`chunk` returns."""

    few_rows = 4

    def chunk(self, part: slice, length: int) -> Chunk:
        """Return the chunks of neighboring tokens.

        Args:
            part: slice of the tokens: several whole chunks, or one shorter chunk.
            length: number of tokens of a whole chunk.
        """
        raise NotImplementedError

    def head_matrices(self) -> Tensor:
        batch, tokens, heads, _ = self.shape
        out = self._zeros(batch, heads, tokens, tokens)
        return assemble(self._chunks_up_to(range(tokens)), out)

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        # One pass over the chunks serves all lags; the base class takes one pass for each, but maps
        # one channel of a head if the factors are common to all.
        per_head = (common_to_channels(left, x, self.shape) is not None for x in band.values())
        if by_head or len(band) == 1 or any(per_head):
            return super().entries(left, band, rows, by_head)
        row, *rights = (x.expand(self.shape) for x in (left, *band.values()))
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            sums = self._sums_of_channels(row, rights, rows)
        strips = (Strip(entries, rows, range(rows.stop)) for entries in sums)
        tokens = self.shape.tokens
        shares = (x.moved(0, -lag, tokens) for lag, x in zip(band, strips, strict=True))
        return sum_strips(shares, rows)

    def _sum_of_heads(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        left, right = (x.transpose(1, 2)[..., None] for x in (left, right))  # (B, H, L, 1)
        chunks = [weigh(chunk, left, right) for chunk in self._chunks_up_to(rows)]
        return sum_over_heads(chunks, self._zeros(self.shape.batch, len(rows), rows.stop))

    def _sum_of_channels(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        return self._sums_of_channels(left, [right], rows)[0]

    def _sums_of_channels(self, left: Tensor, rights: Sequence[Tensor], rows: range) -> Tensor:
        """Return :meth:`_sum_of_channels` for each column factor, (len(rights), B, R, W)."""
        left, *rights = (x.transpose(1, 2) for x in (left, *rights))  # (B, H, L, P)
        out = self._zeros(len(rights), self.shape.batch, len(rows), rows.stop)
        return sums_over_channels(self._chunks_up_to(rows), left, rights, out)

    def _chunks_up_to(self, rows: range) -> list[Chunk]:
        return chunks_up_to(self.chunk, rows, self.shape.batch * self.shape.heads)

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        return run_all(self.chunk, x, transposed)
