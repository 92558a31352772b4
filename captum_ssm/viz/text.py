"""Token relevance as coloured text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError
from .figure import (
    DIVERGING,
    SEQUENTIAL,
    by_name,
    explain_colours,
    new_figure,
    numbers,
    scale,
    strongest,
)
from .labels import FAMILIES, cut, shown, width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters per line, and the size of a character cell in inches.
LINE = 84
CELL = (0.098, 0.32)


def plot_text(
    tokens: Sequence[str],
    relevance: Tensor | Mapping[str, Tensor],
    *,
    marked: Sequence[int] = (),
    one_scale: bool = False,
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw the tokens of a text on a background coloured by their relevance.

    Args:
        tokens: the tokens, in reading order.
        relevance: one number per token (L,), or several such by name, drawn one below another.
        marked: positions to frame, for example the known evidence. Default: none.
        one_scale: one colour scale for all, for relevances of one unit, such as those of the roles
            of a decomposition. Default: False, each has its own.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes, one per relevance.

    Raises:
        InputError: when there is no relevance, it is not finite, or tokens and numbers are not
            equally many.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_text
        >>> figure, axes = plot_text(["a", "b"], {"rollout": torch.tensor([0.2, 0.9])})
        >>> axes[0].get_title(loc="left")
        'rollout   (strongest: 0.9)'
    """
    rows = by_name(relevance, "relevance")
    names = [cut(token, LINE // 2) for token in tokens]
    places, lines = wrap([width(name) for name in names])
    high = (lines * CELL[1] + 0.42) * len(rows) + (0.4 if title else 0)
    figure, axes = new_figure(LINE * CELL[0] + 0.4, high, nrows=len(rows), squeeze=False)
    found = {name: of_tokens(values, "relevance", name, names) for name, values in rows.items()}
    together = scale(torch.cat(list(found.values()))) if one_scale else None
    limits = [together or scale(scores) for scores in found.values()]
    signed = [each for each, _, _ in limits if each == DIVERGING]
    explain_colours(figure, signed[0] if signed else SEQUENTIAL)
    for axis, own, (name, scores) in zip(axes[:, 0], limits, found.items(), strict=True):
        _draw(axis, names, places, scores, own, set(marked))
        axis.set(xlim=(0, LINE), ylim=(lines, 0))
        heading = f"{shown(name)}   (strongest: {strongest(scores):.3g})"
        axis.set_title(heading if name else "", loc="left", size=9)
        axis.axis("off")
    if title:
        figure.suptitle(shown(title), x=0.01, ha="left", size=11)
    return figure, axes[:, 0]


def of_tokens(values: Any, what: str, name: str, tokens: Sequence[str]) -> Tensor:
    """One number per token (L,), or an error that names the relevance.

    Args:
        values: the numbers.
        what: what they are, to begin the messages of errors with.
        name: which of several.
        tokens: the tokens.
    """
    scores = numbers(values, what).flatten()
    if len(scores) != len(tokens):
        raise InputError(f"{what} {name!r} has {len(scores)} numbers for {len(tokens)} tokens.")
    return scores


def _draw(
    axis: Any,
    names: Sequence[str],
    places: Sequence[tuple[int, float]],
    scores: Tensor,
    limits: tuple[str, float, float],
    marked: Collection[int],
) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colour_map, low, high = limits
    for i, (name, (line, column), score) in enumerate(
        zip(names, places, scores.tolist(), strict=True)
    ):
        colour = colormaps[colour_map]((score - low) / (high - low))
        cells = width(name)
        box = Rectangle((column, line + 0.08), cells + 0.8, 0.84, facecolor=colour)
        box.set(edgecolor="black" if i in marked else "0.85", linewidth=1.6 if i in marked else 0.5)
        axis.add_patch(box)
        axis.text(
            column + cells / 2 + 0.4,
            line + 0.52,
            shown(name),
            ha="center",
            va="center",
            fontsize=8.5,
            family=list(FAMILIES),
            color="white" if _is_dark(colour) else "black",
            zorder=3,
        )


def _is_dark(colour: Sequence[float]) -> bool:
    return sum(c * w for c, w in zip(colour, (0.3, 0.59, 0.11), strict=False)) < 0.45


def wrap(widths: Sequence[int]) -> tuple[list[tuple[int, float]], int]:
    """Line and column of every label, and the number of lines."""
    places: list[tuple[int, float]] = []
    line, column = 0, 0.0
    for cells in widths:
        wanted = cells + 1.2
        if column > 0 and column + wanted > LINE:
            line, column = line + 1, 0.0
        places.append((line, column))
        column += wanted
    return places, line + 1
