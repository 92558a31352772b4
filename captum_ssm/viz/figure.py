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
    """Set the method by which a notebook shows the figure; only pyplot's figures have one."""
    figure._repr_png_ = partial(_png_of, figure)  # type: ignore[attr-defined]
    return figure


def _png_of(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    figure.savefig(file := BytesIO(), format="png", bbox_inches="tight")
    return file.getvalue()


def finite_numbers(values: Any, name: str) -> Tensor:
    """Return finite float64 values on the CPU; ``name`` is the name of the values in errors."""
    # torch would round Python's numbers, which are float64, to its default dtype
    dtype = None if hasattr(values, "dtype") else torch.float64
    try:
        tensor = torch.as_tensor(values, dtype=dtype).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}={values!r} is not accepted. Pass only real numbers.") from None
    if tensor.is_complex() or not tensor.numel():
        kind = "complex" if tensor.is_complex() else "empty"
        raise InputError(f"{name} of shape {tuple(tensor.shape)} is {kind}. Pass real numbers.")
    tensor = tensor.double()
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise InputError(
            f"{bad} of the numbers in {name} are NaN or infinite. Pass finite numbers; a "
            "method of this package with verify=True finds the layer that returned them."
        )
    return tensor


def strongest(values: Tensor) -> float:
    """Return the entry with the largest absolute value, with its sign."""
    flat = values.flatten()
    return float(flat[flat.abs().argmax()])


def by_name(values: Any, name: str) -> dict[str, Any]:
    """Return values by name; a single value gets the name ``""``; errors call them ``name``."""
    mapping = dict(values) if isinstance(values, Mapping) else {"": values}
    if not mapping:
        raise InputError(f"{name} is an empty mapping. Pass at least one entry.")
    return mapping


def check_labels(labels: Sequence[str] | None, count: int, name: str) -> None:
    """Raise InputError unless there are ``count`` labels, or None instead of labels."""
    if labels is not None and len(labels) != count:
        raise InputError(f"{name} has {len(labels)} labels for {count} items. Pass one for each.")


def color_scale(values: Tensor) -> tuple[str, float, float]:
    """Return a color map's name and its limits, centered at zero if some value is negative."""
    largest = float(values.abs().max()) or 1.0
    if float(values.min()) < 0:
        return DIVERGING, -largest, largest
    return SEQUENTIAL, 0.0, largest


def explain_colors(figure: Figure, color_map: str) -> None:
    """Add a legend of the color map's ends at the upper right, in place of a color bar."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    ends = {"adds": 0.9, "subtracts": 0.1} if color_map == DIVERGING else {"more relevant": 0.9}
    handles = [Patch(color=colormaps[color_map](x), label=name) for name, x in ends.items()]
    figure.legend(handles=handles, loc="upper right", ncols=2, fontsize=8, frameon=False)


def min_max(values: Tensor) -> Tensor:
    """Scale absolute values to the range from 0 to 1, as in the papers' figures of matrices."""
    sizes = values.abs()
    spread = float(sizes.max() - sizes.min())
    return (sizes - sizes.min()) / (spread or 1.0)


def line_style(index: int) -> dict[str, str]:
    """Return color and dashes for the line with this index; the first 28 lines all differ."""
    dashes = DASHES[index // len(LINES) % len(DASHES)]
    return {"color": LINES[index % len(LINES)], "linestyle": dashes}
