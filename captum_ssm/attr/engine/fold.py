"""Folds: one row of relevance carried through the layers, last to first."""

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
        components: component names that the matrices include.
        reduce: how channels are combined.
        heads: the heads (for Mamba-1: channels) used, or None for all.
        start_layer: layers before this one are left out.
        recipe: ``"paper"`` or ``"published_code"``.
        verify: check every operator against its module's output; a number is the tolerance.
    """

    components: frozenset[str]
    reduce: Reduce
    heads: tuple[int, ...] | None
    start_layer: int
    recipe: str
    verify: bool | float

    def operator(self, layer: Layer) -> Operator:
        """Return the layer's operator, verified, with the chosen components and heads alone."""
        verify_layer(layer, self.verify)
        operator = layer.linear.restrict(self.components).operator.per_channel()
        if self.heads is None:
            return operator
        outside = [h for h in self.heads if not -operator.shape.heads <= h < operator.shape.heads]
        if outside or not self.heads:
            raise OptionError(
                f"heads={list(self.heads)} must name heads (for Mamba-1: channels) between 0 and "
                f"{operator.shape.heads - 1}."
            )
        from_0 = [head % operator.shape.heads for head in self.heads]
        checks.no_repeats(f"heads={list(self.heads)}", from_0)
        return operator.select(from_0)

    def used(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers from start_layer on."""
        if not 0 <= self.start_layer < len(layers):
            raise OptionError(
                f"start_layer={self.start_layer} leaves no layer: the model has {len(layers)}, "
                f"numbered 0 to {len(layers) - 1}."
            )
        return layers[self.start_layer :]


@dataclass(frozen=True)
class LayerMatrix:
    """The matrix M (B, L, L) of a layer, I + M its share in a fold; it need not be formed.

    Attributes:
        rmatvec: row (B, L) to row times matrix.
        matvec: column (B, L) to matrix times column.
        normalized: row (B, L) to row times the matrix with the identity added and every row
            divided by its sum. Default: None, by both maps in turn.
    """

    rmatvec: Callable[[Tensor], Tensor]
    matvec: Callable[[Tensor], Tensor]
    normalized: Callable[[Tensor], Tensor] | None = None

    def carried(self, row: Tensor, normalize_rows: bool, has_stream: bool = True) -> Tensor:
        """Return row (B, L) times I + matrix.

        Args:
            row: the row.
            normalize_rows: whether each row of I + matrix is divided by its sum.
            has_stream: whether the layer has a residual stream, which the identity is for; else
                the identity is left out. Default: True.
        """
        if normalize_rows and self.normalized is not None and has_stream:
            return self.normalized(row)
        if normalize_rows:
            row = row / (has_stream + self.matvec(torch.ones_like(row)))
        return row + self.rmatvec(row) if has_stream else self.rmatvec(row)


#: One layer's part of a fold: the layer and its operator to the matrix added to the identity.
MatrixMaker = Callable[[Layer, Operator], LayerMatrix]


def formed(matrix: Tensor) -> LayerMatrix:
    """Wrap a matrix (B, L, L) that exists."""
    return LayerMatrix(
        lambda row: torch.bmm(row.unsqueeze(1), matrix).squeeze(1),
        lambda column: matmul(matrix, column.unsqueeze(-1)).squeeze(-1),
    )


def scaled(mixing: LayerMatrix, factor: float) -> LayerMatrix:
    """Return a factor times a matrix."""
    if factor == 1:
        return mixing
    return LayerMatrix(lambda r: factor * mixing.rmatvec(r), lambda x: factor * mixing.matvec(x))


def fold(
    layers: Sequence[Layer],
    row: Tensor,
    step: MatrixMaker,
    options: Options,
    normalize_rows: bool = False,
) -> Tensor:
    """Carry ``row`` (B, L) through I + M of the layers, from the last to ``start_layer``.

    Layers are linearized one at a time; an error names the layer where the row stops being finite.
    Several mixers of one block form a stage, see :func:`stages`; :func:`carry` converts between
    token counts. The result is a row over the tokens of the first layer, even if ``start_layer``
    leaves that out.
    """
    at = layers[-1]
    with torch.no_grad():
        for stage in shown(stages(options.used(layers))[::-1]):
            mixing = _join([(layer, step(layer, options.operator(layer))) for layer in stage])
            row = carry(row.to(stage[-1].values), at, stage[-1])
            at = stage[-1]
            row = mixing.carried(row, normalize_rows, at.has_stream)
            if not are_noted(row):
                check_row(row, at)
        # a row that is not finite makes all later ones not finite: the last one tells
        return carry(check_row(row, at), at, layers[0])


def carry(row: Tensor, later: Layer, earlier: Layer) -> Tensor:
    """Carry a row over the tokens of one layer (B, L) to the tokens of a layer before it.

    Where a network makes its map of tokens coarser, the tokens from which a coarser one was made
    share its relevance; see :meth:`captum_ssm.mixers.parts.token_map.Reduction.spread`.
    """
    if later is earlier or later.tokens == earlier.tokens:
        return row
    finer, coarser = earlier.map, later.map
    reduction = None if finer is None else finer.reduction
    if reduction is None or coarser is None or reduction.reduced != coarser.size:
        raise InputError(
            f"Layer {earlier.name!r} mixes {earlier.tokens} tokens and layer {later.name!r} "
            f"{later.tokens}, and nothing says which of the former make which of the latter. Use "
            "layers of one token count alone, with layers=[...]."
        )
    return reduction.spread(row)


def stages(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Group layers that act on the residual stream together, in the order in which they ran.

    Most stages are one layer.  Layers that read the same stream share a stage; if that was not
    seen, layers of one block do that join ``"parallel"``.  A layer that ``"feeds"`` opens the
    stage of the layer after it.
    """
    out: list[list[Layer]] = []
    for layer in layers:
        before = out[-1][-1] if out else None
        together = before is not None and (
            before.joins == "feeds"
            or (before.stage is not None and before.stage == layer.stage)
            or (before.joins == layer.joins == "parallel" and before.block is layer.block)
        )
        if together:
            out[-1].append(layer)
        else:
            out.append([layer])
    return out


def _join(stage: Sequence[tuple[Layer, LayerMatrix]]) -> LayerMatrix:
    """Join the matrices of a stage to one: M (I + F), the sum of parallel branches, fed by F."""
    *earlier, (_, mixing) = stage
    if not earlier:
        return mixing
    fed = [m for layer, m in earlier if layer.joins == "feeds"]
    beside = [m for layer, m in earlier if layer.joins != "feeds"]

    def rmatvec(row: Tensor) -> Tensor:
        out = mixing.rmatvec(row)
        for branch in reversed(fed):
            out = out + branch.rmatvec(out)
        return sum((branch.rmatvec(row) for branch in beside), out)

    def matvec(column: Tensor) -> Tensor:
        out = column
        for branch in fed:
            out = out + branch.matvec(out)
        return sum((branch.matvec(column) for branch in beside), mixing.matvec(out))

    return LayerMatrix(rmatvec, matvec)


def verify_layer(layer: Layer, verify: bool | float) -> None:
    """Check the layer's operator against its module's output, if asked for."""
    if verify is not False:
        layer.verify(None if verify is True else verify)


def check_row(row: Tensor, layer: Layer) -> Tensor:
    """Return the row; if it is not finite, raise an error that names the layer."""
    if not all_finite(row):
        raise NonFiniteError(
            f"Layer {layer.name!r}: the relevance row is no longer finite. With normalize_rows, a "
            "row of I + alpha may sum to zero; else the products of the layers overflow."
        )
    return row


def wanted(items: Sequence[T], indices: Sequence[int] | None) -> list[T]:
    """Return the layers, or stages, that a user's indices name."""
    if indices is None:
        return list(items)
    for index in indices:
        if not -len(items) <= index < len(items):
            raise OptionError(
                f"layers names {index}, but there are {len(items)}, numbered 0 to {len(items) - 1}."
            )
    return [items[index] for index in indices]
