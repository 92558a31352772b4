"""Create figures, check the values to draw, and choose colors.

Colors are distinct for most kinds of color vision; scales of both signs are centered at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Brown for negative, white at zero, purple for positive.
DIVERGING = "PuOr"
#: White at zero, and darker for larger values.
SEQUENTIAL = "Purples"
#: Colors of lines: Okabe and Ito's, which differ for the common kinds of color vision.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
#: Line styles, for more lines than colors, and readers without color vision.
DASHES = ("-", "--", "-.", ":")


def new_figure(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """Return a figure outside of pyplot's global state, so no figure stays open."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return for_notebooks(figure), figure.subplots(**grid)


def for_notebooks(figure: Figure) -> Figure:
    """Let a notebook show a figure outside of pyplot; by default it does so only after pyplot."""
    figure._repr_png_ = partial(_picture, figure)  # type: ignore[attr-defined]
    return figure


def _picture(figure: Figure) -> bytes:
    figure.savefig(file := BytesIO(), format="png", bbox_inches="tight")
    return file.getvalue()


def numbers(values: Any, what: str) -> Tensor:
    """Return finite float64 values on the CPU; ``what`` is the name of the values in errors."""
    # Python's numbers are float64, which torch would round to its default
    dtype = None if hasattr(values, "dtype") else torch.float64
    try:
        found = torch.as_tensor(values, dtype=dtype).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{what}={values!r} is not accepted. Pass only real numbers.") from None
    if found.is_complex() or not found.numel():
        kind = "complex" if found.is_complex() else "empty"
        raise InputError(f"{what} of shape {tuple(found.shape)} is {kind}. Pass real numbers.")
    found = found.double()
    missing = int((~found.isfinite()).sum())
    if missing:
        raise InputError(
            f"{missing} of the numbers in {what} are NaN or infinite. Pass finite numbers; a "
            "method of this package with verify=True finds the layer that returned them."
        )
    return found


def strongest(values: Tensor) -> float:
    """Return the entry with the largest absolute value, with its sign."""
    flat = values.flatten()
    return float(flat[flat.abs().argmax()])


def by_name(values: Any, what: str) -> dict[str, Any]:
    """Return values by name; a single value without a name gets the name ``""``."""
    named = dict(values) if isinstance(values, Mapping) else {"": values}
    if not named:
        raise InputError(f"{what} is an empty mapping. Pass at least one entry.")
    return named


def check_labels(labels: Sequence[str] | None, count: int, what: str) -> None:
    """Raise InputError unless there are ``count`` labels, or None instead of labels."""
    if labels is not None and len(labels) != count:
        raise InputError(f"{what} has {len(labels)} labels for {count} items. Pass one for each.")


def scale(values: Tensor) -> tuple[str, float, float]:
    """Return a color map and its limits, centered at zero if some value is negative."""
    largest = float(values.abs().max()) or 1.0
    if float(values.min()) < 0:
        return DIVERGING, -largest, largest
    return SEQUENTIAL, 0.0, largest


def explain_colors(figure: Figure, color_map: str) -> None:
    """Add a legend for the colors at the upper right, in place of a color bar."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    ends = {"adds": 0.9, "subtracts": 0.1} if color_map == DIVERGING else {"more relevant": 0.9}
    handles = [Patch(color=colormaps[color_map](end), label=name) for name, end in ends.items()]
    figure.legend(handles=handles, loc="upper right", ncols=2, fontsize=8, frameon=False)


def min_max(values: Tensor) -> Tensor:
    """Scale absolute values to the range from 0 to 1, as in the papers' figures of matrices."""
    size = values.abs()
    spread = float(size.max() - size.min())
    return (size - size.min()) / (spread or 1.0)


def line_style(index: int) -> dict[str, str]:
    """Return color and dashes for the line with this index; the first 28 lines all differ."""
    dashes = DASHES[index // len(LINES) % len(DASHES)]
    return {"color": LINES[index % len(LINES)], "linestyle": dashes}
