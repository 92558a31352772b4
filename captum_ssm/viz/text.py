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
    color_scale,
    explain_colors,
    finite_numbers,
    new_figure,
    strongest,
)
from .labels import FAMILIES, Words, as_words, plot_label, truncate, widths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters per line, and the size of a character cell in inches.
LINE = 84
CELL = (0.098, 0.32)
#: Character cells around a word in its box, and between the boxes of two words.
PAD, GAP = 0.4, 0.4
#: With ``asking``, relevance below this share of the query token's entry stays pale.
_NEGLIGIBLE = 1e-3


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
    names = [truncate(label, LINE // 2) for label in words.labels]
    joined = set(words.joined)
    cells = widths(names, joined)
    positions, lines = wrap_words(cells, words)
    height = (lines * CELL[1] + 0.42) * len(rows) + (0.4 if title else 0)
    figure, axes = new_figure(LINE * CELL[0] + 0.4, height, nrows=len(rows), squeeze=False)
    named_scores = {k: scores_per_token(v, "relevance", k, names) for k, v in rows.items()}
    headings = {name: plot_label(name) for name in named_scores}
    for_scale = {name: scores.clone() for name, scores in named_scores.items()}
    for name, scores in named_scores.items():
        if asking is not None and holds_identity(name):
            entry = float(scores[asking])
            headings[name] += f", without query token “{names[asking]}” ({entry:.3g})"
            scores[asking] = 0.0
            # else the entry sets the scale, on which rounding errors of other tokens are pale
            if float(scores.abs().max()) > _NEGLIGIBLE * abs(entry):
                for_scale[name] = scores
    shared_scale = color_scale(torch.cat(list(for_scale.values()))) if one_scale else None
    scales = [shared_scale or color_scale(scores) for scores in for_scale.values()]
    signed = [color_map for color_map, _, _ in scales if color_map == DIVERGING]
    explain_colors(figure, signed[0] if signed else SEQUENTIAL)
    for axis, limits, (name, scores) in zip(axes[:, 0], scales, named_scores.items(), strict=True):
        _draw_tokens(axis, names, cells, positions, joined, scores, limits, set(marked))
        axis.set(xlim=(0, LINE), ylim=(lines, 0))
        heading = f"{headings[name]}   (strongest: {strongest(scores):.3g})"
        axis.set_title(heading if name else "", loc="left", size=9)
        axis.axis("off")
    if title:
        figure.suptitle(plot_label(title), x=0.01, ha="left", size=11)
    return figure, axes[:, 0]


def scores_per_token(values: Any, quantity: str, name: str, tokens: Sequence[str]) -> Tensor:
    """Check that there is one number per token, and return a copy (L,); errors use the names."""
    scores = finite_numbers(values, quantity).flatten().clone()
    if len(scores) != len(tokens):
        mismatch = f"{quantity} {name!r} has {len(scores)} numbers for {len(tokens)} tokens"
        raise InputError(f"{mismatch}. Pass one number per token.")
    return scores


def _draw_tokens(
    axis: Any,
    names: Sequence[str],
    cells: Sequence[float],
    positions: Sequence[tuple[int, float]],
    joined: Collection[int],
    scores: Tensor,
    limits: tuple[str, float, float],
    marked: Collection[int],
) -> None:
    """Draw tokens, ``cells`` wide at (line, column), in boxes colored by score."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    color_map, low, high = limits
    for i, (name, width, (line, column), score) in enumerate(
        zip(names, cells, positions, scores.tolist(), strict=True)
    ):
        color = colormaps[color_map]((score - low) / (high - low))
        left, right = (0 if k in joined else PAD for k in (i, i + 1))
        corner = column - left, line + 0.08
        box = Rectangle(corner, left + width + right, 0.84, facecolor=color)
        box.set(edgecolor="black" if i in marked else "0.85", linewidth=1.6 if i in marked else 0.5)
        axis.add_patch(box)
        style = {"ha": "center", "va": "center", "fontsize": 8.5, "family": list(FAMILIES)}
        style["color"] = "white" if _is_dark(color) else "black"
        axis.text(column + width / 2, line + 0.52, plot_label(name), zorder=3, **style)


def _is_dark(color: Sequence[float]) -> bool:
    """Return True if white text is easier to read on a color; the weights are of brightness."""
    return sum(c * w for c, w in zip(color, (0.3, 0.59, 0.11), strict=False)) < 0.45


def wrap_words(cells: Sequence[float], words: Words) -> tuple[list[tuple[int, float]], int]:
    """Arrange labels in lines; return each label's (line, column), and the number of lines.

    ``cells`` are the labels' widths in character cells. Tokens of one word share a line if there is
    room, and lines of the text begin new lines.
    """
    positions: list[tuple[int, float]] = []
    line, column = 0, 0.0
    for word in _word_ranges(len(cells), words.joined):
        needed = 2 * PAD + sum(cells[i] for i in word)
        if column > 0 and (column + needed > LINE or word[0] - 1 in words.breaks):
            line, column = line + 1, 0.0
        column += PAD
        for i in word:
            if column > PAD and column + cells[i] + PAD > LINE:  # a word longer than a line
                line, column = line + 1, PAD
            positions.append((line, column))
            column += cells[i]
        column += PAD + GAP
    return positions, line + 1


def _word_ranges(count: int, joined: Collection[int]) -> list[range]:
    """Return the words as ranges of token positions."""
    starts = [i for i in range(count) if i == 0 or i not in joined]
    return [range(*limits) for limits in pairwise([*starts, count])]
