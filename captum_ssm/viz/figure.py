"""Figures, and the numbers that are drawn in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """A figure that belongs to no global state, so that plotting leaks none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(**grid)


def numbers(values: Any, what: str) -> Tensor:
    """The values as finite float64 numbers on the CPU.

    Args:
        values: a tensor, an array, or nested sequences of numbers.
        what: what they are, to begin the messages of errors with.
    """
    # Python's numbers are float64, which torch would round to its default
    dtype = None if hasattr(values, "dtype") else torch.float64
    try:
        found = torch.as_tensor(values, dtype=dtype).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{what} does not consist of real numbers: {values!r}.") from None
    if found.is_complex() or not found.numel():
        kind = "complex" if found.is_complex() else "empty"
        raise InputError(f"{what} of shape {tuple(found.shape)} is {kind}; pass real numbers.")
    found = found.double()
    missing = int((~found.isfinite()).sum())
    if missing:
        raise InputError(
            f"{what} holds {missing} numbers that are NaN or infinite and have no colour. Find out "
            "where they come from: verify=True names the layer of a method of this package."
        )
    return found


def strongest(values: Tensor) -> float:
    """The number that is largest in absolute value, with its sign."""
    flat = values.flatten()
    return float(flat[flat.abs().argmax()])


def by_name(values: Any, what: str) -> dict[str, Any]:
    """Several things by name; one without a name is called nothing."""
    named = dict(values) if isinstance(values, Mapping) else {"": values}
    if not named:
        raise InputError(f"{what} is an empty mapping; name at least one.")
    return named


def check_labels(labels: Sequence[str] | None, count: int, what: str) -> None:
    """Raise unless there is one label for each of ``count`` things, or none at all."""
    if labels is not None and len(labels) != count:
        raise InputError(
            f"{what} has {len(labels)} labels for {count} things to label; give one for each."
        )
