"""Folds: one row of relevance carried through the layers, last to first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from captum._utils.progress import progress
from torch import Tensor

from ..errors import NonFiniteError, OptionError
from ..operators import Operator, Reduce
from ..tracing import Layer

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What every implicit-attention method lets the user choose.

    Attributes:
        components: component names that the matrices include.
        reduce: how channels are combined.
        heads: the heads (for Mamba-1: channels) used, or None for all.
        start_layer: layers before this one are left out.
        recipe: ``"paper"`` or ``"published_code"``.
        show_progress: show a bar over layers.
        verify: check every operator against its module's output; a number is the tolerance.
    """

    components: frozenset[str]
    reduce: Reduce
    heads: tuple[int, ...] | None
    start_layer: int
    recipe: str
    show_progress: bool
    verify: bool | float

    def operator(self, layer: Layer) -> Operator:
        """The layer's operator restricted to the chosen components and heads."""
        if self.verify is not False:
            layer.verify(None if self.verify is True else self.verify)
        operator = layer.linear.restrict(self.components).operator.per_channel()
        if self.heads is None:
            return operator
        outside = [h for h in self.heads if not -operator.shape.heads <= h < operator.shape.heads]
        if outside or not self.heads:
            raise OptionError(
                f"heads={list(self.heads)} must name heads (for Mamba-1: channels) between 0 and "
                f"{operator.shape.heads - 1}."
            )
        return operator.select(self.heads)

    def used(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """The layers from start_layer on."""
        if not 0 <= self.start_layer < len(layers):
            raise OptionError(
                f"start_layer={self.start_layer} leaves no layer: the model has {len(layers)}, "
                f"numbered 0 to {len(layers) - 1}."
            )
        return layers[self.start_layer :]


#: One layer's part of a fold: the layer, its operator and the row (B, L) after it.
Step = Callable[[Layer, Operator, Tensor], Tensor]


def fold(
    layers: Sequence[Layer], row: Tensor, step: Step, options: Options, description: str
) -> Tensor:
    """Carry ``row`` (B, L) from the last layer to the first of those used.

    Layers are linearised one at a time; a row that stops being finite is an error that names the
    layer.
    """
    used = options.used(layers)
    with torch.no_grad():
        for layer in shown(used[::-1], description, options.show_progress):
            row = step(layer, options.operator(layer), row.to(layer.values))
            if not torch.isfinite(row).all():
                raise NonFiniteError(
                    f"Layer {layer.name!r}: the relevance row is no longer finite. With "
                    "normalize_rows, a row of I + alpha may sum to zero; else the products of "
                    "the layers overflow."
                )
    return row


def shown(items: Sequence[T], description: str, show: bool) -> Iterable[T]:
    """The items, with a progress bar if asked for."""
    if not show:
        return items
    bar: Iterable[T] = progress(items, desc=description, total=len(items))
    return bar


def row_times(operator: Operator, row: Tensor, reduce: Reduce) -> Tensor:
    """row (B, L) times the reduced matrix; without forming it where the reduction is the mean."""
    if reduce == "mean":
        return operator.mean_rmatvec(row)
    return torch.bmm(row.unsqueeze(1), operator.dense(reduce)).squeeze(1)
