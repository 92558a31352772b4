"""Colours that read the same for most kinds of colour vision, and scales centred at zero."""

from __future__ import annotations

from torch import Tensor

#: Brown for negative, white at zero, purple for positive.
DIVERGING = "PuOr"
#: White at zero, darker for more.
SEQUENTIAL = "Purples"
#: Colours of lines: Okabe and Ito's, which stay apart for the common kinds of colour vision.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
#: Line styles, for when colours run out or are not seen.
DASHES = ("-", "--", "-.", ":")


def scale(values: Tensor) -> tuple[str, float, float]:
    """Colour map and limits: sequential from zero if nothing is negative, else centred at zero."""
    largest = float(values.abs().max()) or 1.0
    if float(values.min()) < 0:
        return DIVERGING, -largest, largest
    return SEQUENTIAL, 0.0, largest


def min_max(values: Tensor) -> Tensor:
    """Absolute values stretched to 0 ... 1, as the papers' figures show matrices."""
    size = values.abs()
    spread = float(size.max() - size.min())
    return (size - size.min()) / (spread or 1.0)


def line_style(index: int) -> dict[str, str]:
    """Colour and dashes of the line of this number, the same for none of the first 28."""
    dashes = DASHES[index // len(LINES) % len(DASHES)]
    return {"color": LINES[index % len(LINES)], "linestyle": dashes}
