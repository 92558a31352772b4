"""Draw the tokens of a text, colored by relevance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attr.catalogue import holds_identity
from ..errors import InputError
from .figure import (
    DIVERGING,
    SEQUENTIAL,
    by_name,
    explain_colors,
    new_figure,
    numbers,
    scale,
    strongest,
)
from .labels import FAMILIES, Words, as_words, cut, shown, widths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters per line, and the size of a character cell in inches.
LINE = 84
CELL = (0.098, 0.32)
#: Character cells around a word in its box, and between the boxes of two words.
PAD, GAP = 0.4, 0.4
#: With ``asking``, relevance below this share of the query token's entry stays pale.
_NOTHING = 1e-3


def plot_text(
    tokens: Any,
    relevance: Any,
    *,
    marked: Sequence[int] = (),
    one_scale: bool = False,
    title: str | None = None,
    asking: int | None = None,
) -> tuple[Figure, Any]:
    """Draw the tokens of a text on a background colored by their relevance.

    Args:
        tokens: the tokens, in reading order; :class:`Tokens` of one word are drawn without a gap.
        relevance: one number per token (L,), or a mapping from names to such numbers, drawn one
            below another. Relevance may also be the first argument, as in other tools.
        marked: positions to frame, for example the known evidence. Default: none.
        one_scale: use one color scale for all relevance of the same unit, such as the roles of a
            decomposition. Default: False, each has its own.
        title: a heading. Default: None.
        asking: the query position, usually -1. The token there is not colored for methods whose
            entry is mostly the identity. Default: None, all tokens are colored.

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
    if isinstance(tokens, Tensor | Mapping):  # numbers first, as in other tools
        tokens, relevance = relevance, tokens
    rows = by_name(relevance, "relevance")
    words = as_words(tokens)
    names = [cut(label, LINE // 2) for label in words.labels]
    joined = set(words.joined)
    cells = widths(names, joined)
    places, lines = wrap(cells, words)
    high = (lines * CELL[1] + 0.42) * len(rows) + (0.4 if title else 0)
    figure, axes = new_figure(LINE * CELL[0] + 0.4, high, nrows=len(rows), squeeze=False)
    found = {name: of_tokens(values, "relevance", name, names) for name, values in rows.items()}
    named = {name: shown(name) for name in found}
    ends = {name: scores.clone() for name, scores in found.items()}
    for name, scores in found.items():
        if asking is not None and holds_identity(name):
            entry = float(scores[asking])
            named[name] += f", without query token “{names[asking]}” ({entry:.3g})"
            scores[asking] = 0.0
            if float(scores.abs().max()) > _NOTHING * abs(entry):
                ends[name] = scores
    together = scale(torch.cat(list(ends.values()))) if one_scale else None
    limits = [together or scale(scores) for scores in ends.values()]
    signed = [each for each, _, _ in limits if each == DIVERGING]
    explain_colors(figure, signed[0] if signed else SEQUENTIAL)
    for axis, own, (name, scores) in zip(axes[:, 0], limits, found.items(), strict=True):
        _draw(axis, names, cells, places, joined, scores, own, set(marked))
        axis.set(xlim=(0, LINE), ylim=(lines, 0))
        heading = f"{named[name]}   (strongest: {strongest(scores):.3g})"
        axis.set_title(heading if name else "", loc="left", size=9)
        axis.axis("off")
    if title:
        figure.suptitle(shown(title), x=0.01, ha="left", size=11)
    return figure, axes[:, 0]


def of_tokens(values: Any, what: str, name: str, tokens: Sequence[str]) -> Tensor:
    """Check that there is one number per token, and return the numbers (L,)."""
    scores = numbers(values, what).flatten().clone()
    if len(scores) != len(tokens):
        found = f"{what} {name!r} has {len(scores)} numbers for {len(tokens)} tokens"
        raise InputError(f"{found}. Pass one number per token.")
    return scores


def _draw(
    axis: Any,
    names: Sequence[str],
    cells: Sequence[float],
    places: Sequence[tuple[int, float]],
    joined: Collection[int],
    scores: Tensor,
    limits: tuple[str, float, float],
    marked: Collection[int],
) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    color_map, low, high = limits
    for i, (name, wide, (line, column), score) in enumerate(
        zip(names, cells, places, scores.tolist(), strict=True)
    ):
        color = colormaps[color_map]((score - low) / (high - low))
        before, behind = (0 if at in joined else PAD for at in (i, i + 1))
        corner = column - before, line + 0.08
        box = Rectangle(corner, before + wide + behind, 0.84, facecolor=color)
        box.set(edgecolor="black" if i in marked else "0.85", linewidth=1.6 if i in marked else 0.5)
        axis.add_patch(box)
        axis.text(
            column + wide / 2,
            line + 0.52,
            shown(name),
            ha="center",
            va="center",
            fontsize=8.5,
            family=list(FAMILIES),
            color="white" if _is_dark(color) else "black",
            zorder=3,
        )


def _is_dark(color: Sequence[float]) -> bool:
    return sum(c * w for c, w in zip(color, (0.3, 0.59, 0.11), strict=False)) < 0.45


def wrap(cells: Sequence[float], words: Words) -> tuple[list[tuple[int, float]], int]:
    """Return line and column of the beginning of every label, and the number of lines.

    Args:
        cells: the width of each label in character cells.
        words: the tokens; tokens of one word share a line if there is room, and lines of the text
            begin new lines.
    """
    places: list[tuple[int, float]] = []
    line, column = 0, 0.0
    for word in _runs(len(cells), words.joined):
        wanted = 2 * PAD + sum(cells[i] for i in word)
        if column > 0 and (column + wanted > LINE or word[0] - 1 in words.breaks):
            line, column = line + 1, 0.0
        column += PAD
        for i in word:
            if column > PAD and column + cells[i] + PAD > LINE:  # a word longer than a line
                line, column = line + 1, PAD
            places.append((line, column))
            column += cells[i]
        column += PAD + GAP
    return places, line + 1


def _runs(count: int, joined: Collection[int]) -> list[range]:
    """Return the words as ranges of token positions."""
    begins = [i for i in range(count) if i == 0 or i not in joined]
    return [range(*ends) for ends in pairwise([*begins, count])]
