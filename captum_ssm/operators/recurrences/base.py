"""Maps and matrices of recurrences, computed from factors that write, decay and read a state.

:class:`FadingRecurrence` is for states that decay independently of each other,
:class:`ChunkedHeads` for heads with several value channels.  Both compute rows by
:mod:`.triangle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import Operator
from ..heads import HeadOperator, per_head_factors
from ..kernels.arithmetic import full_precision, linear_map, underflow_flushed
from ..kernels.bands import Band, lags_of
from ..kernels.chunks import Chunk, run_all
from ..kernels.portions import some_heads
from ..kernels.rows import Strip, sum_of_lags, sum_strips
from ..kernels.triangle import (
    Block,
    Submatrix,
    assemble,
    expand_groups,
    semiseparable_strip,
    sum_over_heads,
    sums_over_channels,
    tiles_of,
    weigh,
)

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
        """Return the operator on some heads; ``others`` are arguments selected by the caller."""
        for name, x in self.tensors().items():
            if name not in others:
                others[name] = x[list(heads)] if name in self.fixed else some_heads(x, heads)
        return self.changed(**others)

    def changed(self, **arguments: Any) -> Self:
        """Return the same operator with some arguments changed."""
        # every argument of __init__ after self has an attribute of the same name
        code = type(self).__init__.__code__
        names = code.co_varnames[1 : code.co_argcount]
        unchanged = {name: getattr(self, name) for name in names if name not in arguments}
        return type(self)(**unchanged, **arguments)


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


#: A band whose lags span more than this number is split into single lags.
TREE_LAGS = 16


class FadingRecurrence(Recurrent):
    """Base class of recurrences with one value channel per head and a diagonal decay."""

    few_rows = 4

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Compute all lags of the band together, or one by one if they span many."""
        lags = lags_of(band)
        if len(lags) > TREE_LAGS:

            def strip_for(right: Tensor) -> Strip:  # rows of diag(left) . self . diag(right)
                return self.entries(left, {0: right}, rows, by_head)

            return sum_of_lags(strip_for, band, rows, self.shape.tokens)
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            if by_head:
                return self._strip_by_head(left, band, rows)
            blocks, (batch, tokens, *_) = self._blocks(left, band, rows), self.shape
            return semiseparable_strip(blocks, batch, tokens, rows, lags)

    def _strip_by_head(self, left: Tensor, band: Band, rows: range) -> Strip:
        """Return :meth:`entries` with ``by_head=True``, for a band with few lags."""
        raise NotImplementedError

    def _blocks(self, left: Tensor, band: Band, rows: range) -> Iterator[Block]:
        """Yield the factors of diag(left) . self . band, some channels and states at a time."""
        raise NotImplementedError


class ChunkedHeads(Recurrent, HeadOperator):
    """Base class of recurrences that are computed in chunks, which :meth:`chunk` returns."""

    few_rows = 4

    def chunk(self, part: slice, length: int) -> Chunk:
        """Return the recurrence's factors over the tokens ``part``, cut into chunks.

        A subclass computes all fields of :class:`.Chunk` from its coefficients.

        Args:
            part: slice of the tokens: several whole chunks, or one shorter chunk.
            length: number of tokens of a whole chunk.
        """
        raise NotImplementedError

    def head_matrices(self) -> Tensor:
        batch, tokens, heads, _ = self.shape
        out = self._zeros(batch, heads, tokens, tokens)
        return assemble(self._tiles(range(tokens)), out)

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Compute the rows, for all lags in one pass over the chunks if that is faster."""
        # the base class takes a pass for each lag, but maps one channel per head if factors allow
        common = (per_head_factors(left, x, self.shape) is not None for x in band.values())
        if by_head or len(band) == 1 or any(common):
            return super().entries(left, band, rows, by_head)
        row, *rights = (x.expand(self.shape) for x in (left, *band.values()))
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            sums = self._sums_of_channels(row, rights, rows)
        strips = (Strip(entries, rows, range(rows.stop)) for entries in sums)
        tokens = self.shape.tokens
        terms = (x.moved(0, -lag, tokens) for lag, x in zip(band, strips, strict=True))
        return sum_strips(terms, rows)

    def _sum_of_heads(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Compute the rows from tiles whose rows and columns are multiplied by the factors."""
        factors = [x.transpose(1, 2)[..., None] for x in (left, right)]  # (B, H, L, 1)
        out = self._zeros(self.shape.batch, len(rows), rows.stop)

        def chunk(part: slice, length: int) -> Chunk:  # of diag(left) . self . diag(right)
            return weigh(expand_groups(self.chunk(part, length)), *factors)

        return sum_over_heads(tiles_of(chunk, rows, self.shape.batch * self.shape.heads), out)

    def _sum_of_channels(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        return self._sums_of_channels(left, [right], rows)[0]

    def _sums_of_channels(self, left: Tensor, rights: Sequence[Tensor], rows: range) -> Tensor:
        """Return :meth:`_sum_of_channels` for each column factor, (len(rights), B, R, W)."""
        left, *rights = (x.transpose(1, 2) for x in (left, *rights))  # (B, H, L, P)
        out = self._zeros(len(rights), self.shape.batch, len(rows), rows.stop)
        row = left[:, :, rows.start : rows.stop]
        return sums_over_channels(self._tiles(rows), row, rights, out)

    def _tiles(self, rows: range) -> Iterator[Submatrix]:
        """Yield the tiles of some rows of each head's matrix."""
        return tiles_of(self.chunk, rows, self.shape.batch * self.shape.heads)

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        return run_all(self.chunk, x, transposed)
