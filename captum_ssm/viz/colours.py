"""Colours that read the same for most kinds of colour vision, and scales centred at zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Brown for negative, white at zero, purple for positive.
DIVERGING = "PuOr"
#: White at zero, darker for more.
SEQUENTIAL = "Purples"


def scale(values: Tensor) -> tuple[str, float, float]:
    """Colour map and limits: sequential from zero if nothing is negative, else centred at zero."""
    largest = float(values.abs().max()) or 1.0
    if float(values.min()) < 0:
        return DIVERGING, -largest, largest
    return SEQUENTIAL, 0.0, largest


def new_figure(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """A figure that belongs to no global state, so that plotting leaks none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(**grid)


def shown(token: str) -> str:
    """A token as plain text: control characters spelled out, mathtext's dollar sign escaped."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in token) or "∅"
    return plain.replace("$", r"\$")
