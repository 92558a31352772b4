"""Token relevance as coloured text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError
from .colours import new_figure, scale, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters per line, and the size of a character cell in inches.
_LINE = 84
_CELL = (0.098, 0.32)


def plot_text(
    tokens: Sequence[str],
    relevance: Tensor | Mapping[str, Tensor],
    *,
    marked: Sequence[int] = (),
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw the tokens of a text on a background coloured by their relevance.

    Args:
        tokens: the tokens, in reading order.
        relevance: one number per token (L,), or several such by name, drawn one below another;
            each has a colour scale of its own.
        marked: positions to frame, for example the known evidence. Default: none.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes, one per relevance.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_text
        >>> figure, axes = plot_text(["a", "b"], {"rollout": torch.tensor([0.2, 0.9])})
        >>> figure.savefig("text.png")  # doctest: +SKIP
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    rows = relevance if isinstance(relevance, Mapping) else {"": relevance}
    labels = [shown(token) for token in tokens]
    places, lines = _wrap(labels)
    width, height = _LINE * _CELL[0] + 0.4, (lines * _CELL[1] + 0.42) * len(rows)
    figure, axes = new_figure(width, height + (0.4 if title else 0), nrows=len(rows), squeeze=False)
    for axis, (name, values) in zip(axes[:, 0], rows.items(), strict=True):
        scores = torch.as_tensor(values).detach().float().cpu().flatten()
        if len(scores) != len(labels):
            raise InputError(
                f"relevance {name!r} has {len(scores)} numbers for {len(labels)} tokens."
            )
        colour_map, low, high = scale(scores)
        for i, (label, (line, column)) in enumerate(zip(labels, places, strict=True)):
            colour = colormaps[colour_map]((float(scores[i]) - low) / (high - low))
            box = Rectangle(
                (column, line + 0.08),
                len(label) + 0.8,
                0.84,
                facecolor=colour,
                edgecolor="black" if i in marked else "0.85",
                linewidth=1.6 if i in marked else 0.5,
            )
            axis.add_patch(box)
            dark = sum(c * w for c, w in zip(colour, (0.3, 0.59, 0.11), strict=False)) < 0.45
            axis.text(
                column + len(label) / 2 + 0.4,
                line + 0.52,
                label,
                ha="center",
                va="center",
                fontsize=8.5,
                family="monospace",
                color="white" if dark else "black",
                zorder=3,
            )
        axis.set(xlim=(0, _LINE), ylim=(lines, 0))
        axis.set_title(f"{shown(name)}   (largest: {high:.3g})" if name else "", loc="left", size=9)
        axis.axis("off")
    if title:
        figure.suptitle(shown(title), x=0.01, ha="left", size=11)
    return figure, axes[:, 0]


def _wrap(labels: Sequence[str]) -> tuple[list[tuple[int, float]], int]:
    """Line and column of every label, and the number of lines."""
    places: list[tuple[int, float]] = []
    line, column = 0, 0.0
    for label in labels:
        width = len(label) + 1.2
        if column > 0 and column + width > _LINE:
            line, column = line + 1, 0.0
        places.append((line, column))
        column += width
    return places, line + 1
