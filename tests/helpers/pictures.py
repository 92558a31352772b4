"""What tests of pictures and pages share."""

from __future__ import annotations

import warnings
from typing import Any

AWKWARD = [
    "$x_1$", "<script>", "a\nb", "", " ", "\u200f\u05d0", "\x07", "naïve", "$", "\\$a$", "שלום",
    "سلام", "😀", "\u200b", "\u0301", "日本", "❤\ufe0f", "\"'&lt;",
]  # fmt: skip


def draw(figure: Any) -> None:
    """Draw a figure; a warning, such as that of a missing glyph, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()
