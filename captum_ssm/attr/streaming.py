"""Mixings whose matrix exists a strip of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..operators import Operator, Reduce
from ..operators.by_channel import goes_by_channel
from ..operators.fitting import fitting
from ..operators.strips import Strip
from ..operators.thin import times
from .fold import Mixing
from .memory import Budget

#: Up to this part of the rows are made row by row where a whole matrix would go by channel.
_FEW = 8

#: The entries (B, R, W) of a strip to what takes their place; they may be overwritten.
Change = Callable[[Strip], Tensor]


def reduced(operator: Operator, reduce: Reduce, budget: Budget) -> Mixing:
    """The reduced matrix of an operator; not formed where the reduction is the mean."""
    if reduce == "mean":
        return Mixing(operator.mean_rmatvec, operator.mean_matvec)
    return streamed(operator, reduce, budget, _unchanged)


def streamed(
    operator: Operator,
    reduce: Reduce,
    budget: Budget,
    change: Change,
    whole: Tensor | None = None,
) -> Mixing:
    """A change of every entry of an operator's reduced matrix, of which a strip exists at a time.

    Rows to which nothing is given are left out, so that a single query costs a single row.

    Args:
        operator: the operator.
        reduce: how its channels become one matrix.
        budget: what the strips may take.
        change: what becomes of the entries.
        whole: the reduced matrix (B, L, L) where it is there already. Default: None.
    """
    tokens = operator.shape.tokens
    quick = goes_by_channel(operator, reduce) and budget.holds_matrix(operator)

    def strips(within: range) -> Iterator[tuple[Strip, Tensor]]:
        matrix = whole
        if matrix is None and quick and len(within) > tokens // _FEW:
            matrix = operator.dense(reduce)

        def form(rows: range) -> tuple[Strip, Tensor]:
            if matrix is None:
                strip = operator.reduced_strip(rows, reduce)
            else:
                strip = Strip(matrix[:, rows.start : rows.stop].clone(), rows, range(tokens))
            return strip, change(strip)

        return fitting(within, budget.height(operator, reduce), form)

    def rmatvec(row: Tensor) -> Tensor:
        out = torch.zeros_like(row)
        for strip, entries in strips(_reached(row)):
            _add(out, strip, _times(_of_rows(row, strip), entries))
        return out

    def matvec(column: Tensor) -> Tensor:
        out = torch.zeros_like(column)
        for strip, entries in strips(range(tokens)):
            values = column[:, strip.columns.start : strip.columns.stop]
            _of_rows(out, strip).copy_(times(entries, values.unsqueeze(-1)).squeeze(-1))
        return out

    def normalized(row: Tensor) -> Tensor:
        out = torch.zeros_like(row)
        for strip, entries in strips(_reached(row)):
            share = _of_rows(row, strip) / (1 + entries.sum(-1))
            _of_rows(out, strip).add_(share)
            _add(out, strip, _times(share, entries))
        return out

    return Mixing(rmatvec, matvec, normalized)


def _unchanged(strip: Strip) -> Tensor:
    return strip.entries


def _reached(row: Tensor) -> range:
    """From the first to the last token to which any example's row (B, L) gives something."""
    tokens = row.ne(0).any(0).nonzero().flatten()
    return range(int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else range(0)


def _of_rows(x: Tensor, strip: Strip) -> Tensor:
    return x[:, strip.rows.start : strip.rows.stop]


def _times(row: Tensor, entries: Tensor) -> Tensor:
    return torch.bmm(row.unsqueeze(1), entries).squeeze(1)


def _add(out: Tensor, strip: Strip, values: Tensor) -> None:
    """Add to the columns of a strip, in place."""
    out[:, strip.columns.start : strip.columns.stop] += values
