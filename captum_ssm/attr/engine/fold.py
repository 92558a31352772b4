"""Multiply relevance (B, L) by the matrices of all layers, from the last layer to the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import InputError, NonFiniteError, OptionError
from ...operators import Operator, Reduce
from ...operators.kernels.arithmetic import matmul
from ...operators.kernels.truths import all_finite, are_noted
from ...tracing import Layer
from ..call import checks
from ..call.progress import shown

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """The options that every implicit-attention method has.

    Attributes:
        components: names of the components that the matrices include.
        reduce: the reduction that combines channels into one matrix.
        heads: indices of the heads (for Mamba-1: channels) used, or None for all.
        start_layer: index of the first layer used; layers before it are left out.
        recipe: ``"paper"``, or ``"published_code"`` to reproduce the authors' scripts.
        verify: whether operators are checked against modules' outputs; a number is the tolerance.
    """

    components: frozenset[str]
    reduce: Reduce
    heads: tuple[int, ...] | None
    start_layer: int
    recipe: str
    verify: bool | float

    def operator(self, layer: Layer) -> Operator:
        """Return the layer's verified operator, with only the chosen components and heads."""
        verify_layer(layer, self.verify)
        # without mixing of channels: a channel's matrix is of tokens
        operator = layer.linear.restrict(self.components).operator.per_channel()
        if self.heads is None:
            return operator
        outside = [h for h in self.heads if not -operator.shape.heads <= h < operator.shape.heads]
        if outside or not self.heads:
            raise OptionError(
                f"heads={list(self.heads)} does not fit layer {layer.name!r}. Pass heads (for "
                f"Mamba-1: channels) between 0 and {operator.shape.heads - 1}, or None for all."
            )
        nonnegative = [head % operator.shape.heads for head in self.heads]
        checks.no_repeats(f"heads={list(self.heads)}", nonnegative)
        return operator.select(nonnegative)

    def used(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers from ``start_layer`` on; raise if there are none."""
        if not 0 <= self.start_layer < len(layers):
            raise OptionError(
                f"start_layer={self.start_layer} leaves no layer: the model has {len(layers)} "
                f"mixers. Pass a number between 0 and {len(layers) - 1}."
            )
        return layers[self.start_layer :]


@dataclass(frozen=True)
class LayerMatrix:
    """The matrix M (B, L, L) of a layer as functions, so that M need not be kept in memory.

    Attributes:
        rmatvec: function from a row (B, L) to the row times M.
        matvec: function from a column (B, L) to M times the column.
        normalized: function from a row (B, L) to the row times I + M, with every row of I + M
            divided by its sum. Default: None, computed from the other two functions.
    """

    rmatvec: Callable[[Tensor], Tensor]
    matvec: Callable[[Tensor], Tensor]
    normalized: Callable[[Tensor], Tensor] | None = None

    def multiply_row(self, row: Tensor, normalize_rows: bool, has_stream: bool = True) -> Tensor:
        """Return relevance ``row`` (B, L) of the layer's output tokens, times I + M.

        With ``normalize_rows`` each row of I + M is divided by its sum. A layer without a residual
        stream has no identity I.
        """
        if normalize_rows and self.normalized is not None and has_stream:
            return self.normalized(row)
        if normalize_rows:
            # the sums of rows of I + M, or of M if ``has_stream`` is False, 0
            row = row / (has_stream + self.matvec(torch.ones_like(row)))
        return row + self.rmatvec(row) if has_stream else self.rmatvec(row)


#: A method's function from a layer and its operator to the layer's matrix M.
MatrixMaker = Callable[[Layer, Operator], LayerMatrix]


def stored(matrix: Tensor) -> LayerMatrix:
    """Wrap a matrix (B, L, L) in memory as a :class:`LayerMatrix`."""
    return LayerMatrix(
        lambda row: torch.bmm(row.unsqueeze(1), matrix).squeeze(1),
        lambda column: matmul(matrix, column.unsqueeze(-1)).squeeze(-1),
    )


def scaled(mixing: LayerMatrix, factor: float) -> LayerMatrix:
    """Return a layer's matrix multiplied by a constant ``factor``."""
    if factor == 1:
        return mixing
    # without `normalized`, which is not linear in the matrix
    return LayerMatrix(lambda r: factor * mixing.rmatvec(r), lambda x: factor * mixing.matvec(x))


def fold(
    layers: Sequence[Layer],
    row: Tensor,
    matrix_of: MatrixMaker,
    options: Options,
    normalize_rows: bool = False,
) -> Tensor:
    """Multiply relevance ``row`` (B, L) by I + M of each layer, from the last to ``start_layer``.

    One layer is linearized at a time; an error names the layer after which the row is not finite.
    Parallel mixers of a block have one matrix together, see :func:`stages`. If layers differ in
    their token counts, :func:`carry` converts the relevance. The result is relevance of the first
    layer's tokens, even if ``start_layer`` leaves this layer out.
    """
    current = layers[-1]
    with torch.no_grad():
        for stage in shown(stages(options.used(layers))[::-1]):
            mixing = _join([(layer, matrix_of(layer, options.operator(layer))) for layer in stage])
            row = carry(row.to(stage[-1].values), current, stage[-1])
            current = stage[-1]
            row = mixing.multiply_row(row, normalize_rows, current.has_stream)
            del mixing  # its operators would stay in memory while the next are built
            if not are_noted(row):  # noted checks are read once, at the end
                check_row(row, current)
        # a row that is not finite makes all later rows not finite, so the last check is enough
        return carry(check_row(row, current), current, layers[0])


def carry(row: Tensor, later: Layer, earlier: Layer) -> Tensor:
    """Convert relevance (B, L) of one layer's tokens to the tokens of an earlier layer.

    If the network merged tokens of a 2-D grid between the layers, each merged token's relevance is
    divided among its sources; see :meth:`captum_ssm.mixers.parts.token_map.Downsampling.spread`.
    """
    if later is earlier or later.tokens == earlier.tokens:
        return row
    finer, coarser = earlier.map, later.map
    downsampling = None if finer is None else finer.downsampling
    if downsampling is None or coarser is None or downsampling.coarser_size != coarser.size:
        raise InputError(
            f"Layer {earlier.name!r} mixes {earlier.tokens} tokens, but layer {later.name!r} mixes "
            f"{later.tokens}, and the map between these tokens is not known. Pass layers=[...] "
            "with only layers of one token count."
        )
    return downsampling.spread(row)


def stages(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Group layers whose outputs enter the residual stream together, in the order of the run.

    Most groups (stages) have one layer.  Parallel mixers with the same residual stream are one
    stage, or layers of one block with ``joins="parallel"`` if no stream was recorded.  A layer with
    ``joins="feeds"`` passes its output to the next layer, and shares that layer's stage.
    """
    out: list[list[Layer]] = []
    for layer in layers:
        previous = out[-1][-1] if out else None
        together = previous is not None and (
            previous.joins == "feeds"
            or (previous.stage is not None and previous.stage == layer.stage)
            or (previous.joins == layer.joins == "parallel" and previous.block is layer.block)
        )
        if together:
            out[-1].append(layer)
        else:
            out.append([layer])
    return out


def _join(stage: Sequence[tuple[Layer, LayerMatrix]]) -> LayerMatrix:
    """Add the matrices of parallel layers; if a layer F feeds the last one M, use M (I + F).

    With several feeding layers it is M (I + F2) (I + F1), where F1 is the earlier one.
    """
    *earlier, (_, last) = stage
    if not earlier:
        return last
    feeding = [matrix for layer, matrix in earlier if layer.joins == "feeds"]
    parallel = [matrix for layer, matrix in earlier if layer.joins != "feeds"]

    def rmatvec(row: Tensor) -> Tensor:  # the row times M, then I + F2, then I + F1
        out = last.rmatvec(row)
        for branch in reversed(feeding):
            out = out + branch.rmatvec(out)
        return sum((branch.rmatvec(row) for branch in parallel), out)

    def matvec(column: Tensor) -> Tensor:  # I + F1, then I + F2, then M, times the column
        out = column
        for branch in feeding:
            out = out + branch.matvec(out)
        return sum((branch.matvec(column) for branch in parallel), last.matvec(out))

    return LayerMatrix(rmatvec, matvec)


def verify_layer(layer: Layer, verify: bool | float) -> None:
    """Check the layer's operator against its module's output, unless ``verify`` is False."""
    if verify is not False:
        layer.verify(None if verify is True else verify)


def check_row(row: Tensor, layer: Layer) -> Tensor:
    """Return relevance ``row``; if NaN or infinite, raise an error that names the layer."""
    if not all_finite(row):
        raise NonFiniteError(
            f"Relevance is NaN or infinite after layer {layer.name!r}. The products of the layers "
            "overflow, or with normalize_rows=True a row of I + alpha sums to zero. Pass "
            "normalize_rows=False, a larger start_layer, or the model in a wider dtype."
        )
    return row


def at_indices(items: Sequence[T], indices: Sequence[int] | None) -> list[T]:
    """Return the items (layers or stages) at the given indices; None returns all."""
    if indices is None:
        return list(items)
    for index in indices:
        if not -len(items) <= index < len(items):
            raise OptionError(
                f"layers contains {index}. Pass indices from {-len(items)} to {len(items) - 1}."
            )
    return [items[index] for index in indices]
