"""Layer matrices computed a few rows (a strip) at a time, within a memory budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OptionError
from ...operators import Operator, Reduce
from ...operators.kernels.arithmetic import matmul
from ...operators.kernels.portions import as_memory_allows
from ...operators.kernels.rows import Strip
from ...operators.kernels.truths import nonzero_range
from ...operators.reduction import goes_by_channel
from ...tracing.record import free_memory
from .fold import LayerMatrix

#: Rows are computed one by one, not as a whole matrix, if at most 1 / _FEW of them are needed.
_FEW = 8

#: A function from a strip to new entries (B, R, W); the function may overwrite the strip.
Change = Callable[[Strip], Tensor]


def reduced(operator: Operator, reduce: Reduce, budget: Budget) -> LayerMatrix:
    """Return an operator's matrix, reduced over channels; a mean matrix is never kept in memory."""
    if reduce == "mean":
        return LayerMatrix(operator.mean_rmatvec, operator.mean_matvec)
    return in_strips(operator, reduce, budget, lambda strip: strip.entries)


def in_strips(
    operator: Operator, reduce: Reduce, budget: Budget, change: Change, whole: Tensor | None = None
) -> LayerMatrix:
    """Return an operator's reduced matrix with changed entries, computed one strip at a time.

    Rows that are multiplied by 0 are skipped, so a single query costs a single row.

    Args:
        operator: the operator.
        reduce: the reduction of all channels to one matrix.
        budget: the memory for strips.
        change: function from a strip to its new entries.
        whole: the reduced matrix (B, L, L), if it exists already. Default: None.
    """
    tokens = operator.shape.tokens
    whole_is_faster = goes_by_channel(operator, reduce) and budget.holds_matrix(operator)

    def changed_strips(row_range: range) -> Iterator[tuple[Strip, Tensor]]:
        """Yield strips (a few matrix rows) in ``row_range``, with changed entries.

        Rows come from a whole matrix, if there is one or it is faster; from all channels at once,
        up to ``few`` rows; or from sums over blocks of channels.
        """
        matrix = whole
        few = budget.few_rows(operator) if reduce == "mean" else 0
        if matrix is None and whole_is_faster and len(row_range) > tokens // _FEW:
            matrix = operator.dense(reduce)

        def strip_of(rows: range) -> tuple[Strip, Tensor]:
            """Return a strip and its changed entries."""
            if matrix is not None:  # a copy, because `change` may overwrite it
                strip = Strip(matrix[:, rows.start : rows.stop].clone(), rows, range(tokens))
            elif len(rows) <= few:
                strip = Strip(operator.rows(rows, reduce), rows, range(tokens))
            else:
                strip = _strip_of_rows(operator, rows, reduce)
            return strip, change(strip)

        return as_memory_allows(row_range, budget.height(operator, reduce), strip_of)

    def rmatvec(row: Tensor) -> Tensor:  # see LayerMatrix, as for the next two functions
        out = torch.zeros_like(row)
        for strip, entries in changed_strips(nonzero_range(row)):
            _add_at_columns(out, strip, _times(_at_rows(row, strip), entries))
        return out

    def matvec(column: Tensor) -> Tensor:
        out = torch.zeros_like(column)
        for strip, entries in changed_strips(range(tokens)):
            values = column[:, strip.columns.start : strip.columns.stop]
            _at_rows(out, strip).copy_(matmul(entries, values.unsqueeze(-1)).squeeze(-1))
        return out

    def normalized(row: Tensor) -> Tensor:
        out = torch.zeros_like(row)
        for strip, entries in changed_strips(nonzero_range(row)):
            weight = _at_rows(row, strip) / (1 + entries.sum(-1))  # by the row sums of I + M
            _at_rows(out, strip).add_(weight)  # times I
            _add_at_columns(out, strip, _times(weight, entries))
        return out

    return LayerMatrix(rmatvec, matvec, normalized)


def _strip_of_rows(operator: Operator, rows: range, reduce: Reduce) -> Strip:
    """Return some rows of ``operator.dense(reduce)`` without computing the other rows."""
    _, tokens, heads, per_head = operator.shape
    if reduce != "mean":
        return Strip(operator.rows(rows, reduce), rows, range(tokens))
    one = torch.ones(1, 1, 1, 1, dtype=operator.dtype, device=operator.device)
    # entries() sums over channels, with the same weight for all; {0: one} is the identity's band
    return operator.entries(one / (heads * per_head), {0: one}, rows)


def _at_rows(x: Tensor, strip: Strip) -> Tensor:
    """Return the entries of ``x`` (B, L) at the rows of a strip, a view."""
    return x[:, strip.rows.start : strip.rows.stop]


def _times(row: Tensor, entries: Tensor) -> Tensor:
    """Return a row (B, R) times a strip's entries (B, R, W), (B, W)."""
    return torch.bmm(row.unsqueeze(1), entries).squeeze(1)


def _add_at_columns(out: Tensor, strip: Strip, values: Tensor) -> None:
    """Add values (B, W) to ``out`` (B, L) at the columns of a strip, in place."""
    out[:, strip.columns.start : strip.columns.stop] += values


#: Values of ``memory_budget``: bytes, a size such as ``"512MiB"``, or None.
MemoryBudget = int | str | None

_UNITS = {"": 1, "B": 1, **{f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}}
_UNITS |= {f"{k}IB": 1024**i for i, k in enumerate("KMGT", 1)}
#: The default budget is the free memory divided by this number.
_SHARE = 8
#: The number of tensors of a strip's size (times channels, if needed) that exist at the same time.
_COPIES = 4
#: Largest size of a strip in entries (32 MiB in float32) and in rows, and smallest number of rows.
#: Each strip computes the state of all earlier tokens, so small strips would cost more.
_ENTRIES = 2**23
_ROWS = 4096
_FEW_ROWS = 512


@dataclass(frozen=True)
class Budget:
    """The memory for strips of matrices and for temporary tensors.

    Attributes:
        bytes: the number of bytes; None for a share of the device's free memory at the time of use.
    """

    bytes: int | None = None

    @classmethod
    def parse(cls, memory_budget: MemoryBudget) -> Budget:
        """Read the option ``memory_budget``: bytes, a size such as ``"512MiB"``, or None."""
        if memory_budget is None:
            return cls(None)
        size: float | None = None
        if isinstance(memory_budget, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", memory_budget)
            unit = None if match is None else _UNITS.get(match[2].upper())
            size = None if match is None or unit is None else float(match[1]) * unit
        elif isinstance(memory_budget, int) and not isinstance(memory_budget, bool):
            size = memory_budget
        if size is None or size <= 0:
            raise OptionError(
                f"memory_budget={memory_budget!r} is not a size. Pass a positive number of bytes, "
                "a string such as '512MiB' or '2GB', or None for a share of the free memory."
            )
        return cls(int(size))

    def on(self, device: torch.device) -> int:
        """Return the number of bytes to use on a device."""
        return free_memory(device) // _SHARE if self.bytes is None else self.bytes

    def height(self, operator: Operator, reduce: Reduce) -> int:
        """Return the largest number of rows per strip of an operator's reduced matrix."""
        batch, tokens, heads, per_head = operator.shape
        # the mean is summed in blocks of channels, other reductions need all channels of an entry
        channels = 0 if reduce == "mean" else heads * per_head
        row_bytes = _COPIES * (1 + channels) * batch * tokens * operator.dtype.itemsize
        height = self.on(operator.device) // row_bytes
        if height == 0 and self.bytes is not None:
            raise OptionError(
                f"memory_budget={self.bytes} bytes is too small for one matrix row with {tokens} "
                f"tokens and a batch of {batch}. Pass at least {row_bytes} bytes"
                + ("." if batch == 1 else ", or internal_batch_size=1.")
            )
        most = max(_FEW_ROWS, _ENTRIES // (batch * tokens))
        return max(1, min(height, most, _ROWS))  # without a budget, one row is always tried

    def few_rows(self, operator: Operator) -> int:
        """Return the largest number of rows that are faster to compute for all channels at once."""
        row_bytes = _COPIES * torch.Size(operator.shape).numel() * operator.dtype.itemsize
        faster = max(leaf.few_rows for leaf in operator.leaves())
        return min(faster, self.on(operator.device) // row_bytes)

    def holds_matrix(self, operator: Operator) -> bool:
        """Return True if an operator's whole reduced matrix fits into the budget."""
        batch, tokens, *_ = operator.shape
        return self.on(operator.device) >= _COPIES * batch * tokens**2 * operator.dtype.itemsize
