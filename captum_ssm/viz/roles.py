"""Draw each token's relevance by role as stacked bars over the words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError
from .figure import new_figure
from .labels import FAMILIES, as_words, plot_label, truncate, width
from .text import CELL, LINE, PAD, scores_per_token, wrap_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Color and hatch of each role: distinct for the common kinds of color vision, and in print
#: without colors.
_STYLES = {
    "content": ("#0072b2", ""),
    "key": ("#e69f00", "////"),
    "query": ("#009e73", "...."),
    "gate": ("#cc79a7", "\\\\\\\\"),
    "step": ("#f0e442", "xxxx"),
}
#: The color and hatch of a role without an entry in the table above.
_OTHER_STYLE = ("#999999", "")
#: Height in inches of the bars above a line of text.
_BARS_HEIGHT = 1.5
#: A bar's width in characters of the text.
_BAR_WIDTH = 2.4
#: A role's name is written beside its largest bar if the bar is at least this share of the scale.
_NAMED_SHARE = 0.08


def plot_roles(
    tokens: Sequence[str],
    roles: Mapping[str, Tensor],
    *,
    marked: Sequence[int] = (),
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw a bar of relevance, stacked by role, over each token of a text.

    Negative relevance is stacked below zero. All lines of a long text have the same scale. A role's
    name is written beside its largest bar.

    Args:
        tokens: the tokens, in reading order; :class:`Tokens` of one word are drawn without a gap.
        roles: a mapping from roles to one number per token (L,), such as one example's ``roles``
            from :meth:`LatimFlow.decompose <captum_ssm.LatimFlow.decompose>`.
        marked: positions to frame, for example the known evidence. Default: none.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes, one per line of text.

    Raises:
        InputError: when there is no role, relevance is not finite, or tokens and numbers are not
            equally many.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_roles
        >>> roles = {"content": torch.tensor([0.0, 2.0]), "key": torch.tensor([1.0, 0.5])}
        >>> figure, axes = plot_roles(["anna", "lamp"], roles)
        >>> [float(bar.get_height()) for bar in axes[0].patches]
        [0.0, 2.0, 1.0, 0.5]
    """
    from matplotlib.patheffects import withStroke

    if not isinstance(roles, Mapping) or not roles:
        raise InputError(
            f"roles={roles!r} is not accepted. Pass a mapping from at least one role to one number "
            "per token, such as LatimFlow(model).decompose(...).roles."
        )
    words = as_words(tokens)
    names = [truncate(label, LINE // 2) for label in words.labels]
    scores = {role: scores_per_token(values, "role", role, names) for role, values in roles.items()}
    cells = [max(width(name), 3) for name in names]
    positions, lines = wrap_words(cells, words)
    middles = [column + cell / 2 for (_, column), cell in zip(positions, cells, strict=True)]
    by_line = [[i for i, (line, _) in enumerate(positions) if line == k] for k in range(lines)]
    size = (LINE * CELL[0] + 0.9, (_BARS_HEIGHT + 0.3) * lines + 0.4 + 0.3 * bool(title))
    figure, axes = new_figure(*size, nrows=lines, squeeze=False)
    for axis, shown in zip(axes[:, 0], by_line, strict=True):
        _label_words(axis, [middles[i] for i in shown], [names[i] for i in shown])
        for i, label in zip(shown, axis.get_xticklabels(), strict=True):
            if i in marked:
                label.set_bbox({"edgecolor": "black", "facecolor": "none", "pad": 1.5})
    above, below = torch.zeros(len(names)).double(), torch.zeros(len(names)).double()
    bars: dict[str, list[tuple[float, float]]] = {}  # by role: each token's (bottom, height)
    for role, values in scores.items():
        bottoms = torch.where(values < 0, below, above)
        bars[role] = list(zip(bottoms.tolist(), values.tolist(), strict=True))
        above, below = above + values.clamp(min=0), below + values.clamp(max=0)
    high, low = float(above.max()), float(below.min())
    margin = 0.1 * (high - low or 1.0)
    halo = [withStroke(linewidth=3, foreground="white")]
    for role, stacked in bars.items():
        largest = max(range(len(names)), key=lambda i: stacked[i][1])
        if stacked[largest][1] <= _NAMED_SHARE * (high - low):
            largest = -1  # no bar is large enough for the role's name
        for axis, shown in zip(axes[:, 0], by_line, strict=True):
            _draw_bars(axis, role, [middles[i] for i in shown], [stacked[i] for i in shown])
            if largest in shown:
                bottom, height = stacked[largest]
                x, y = middles[largest] + _BAR_WIDTH / 2 + 0.3, bottom + height / 2
                axis.text(x, y, plot_label(role), va="center", fontsize=8.5, path_effects=halo)
            axis.set_ylim(low - margin, high + margin)
    _add_legend(figure, scores)
    if title:
        figure.suptitle(plot_label(title), x=0.01, ha="left", size=11)
    return figure, axes[:, 0]


def _label_words(axis: Any, middles: Sequence[float], names: Sequence[str]) -> None:
    """Label an axis' ticks with words, and draw a line at 0."""
    axis.set_xlim(PAD - 1, LINE + PAD)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(middles, map(plot_label, names), family=list(FAMILIES), fontsize=8.5)
    axis.tick_params(axis="x", length=0)
    axis.tick_params(axis="y", labelsize=7)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_bars(
    axis: Any, role: str, middles: Sequence[float], bars: Sequence[tuple[float, float]]
) -> None:
    """Draw the bars of one role, each given as (bottom, height)."""
    color, hatch = _STYLES.get(role, _OTHER_STYLE)
    bottoms, heights = zip(*bars, strict=True)
    style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
    axis.bar(middles, heights, _BAR_WIDTH, bottoms, **style)


def _add_legend(figure: Figure, roles: Mapping[str, Any]) -> None:
    """Add a legend with the color and hatch of each role."""
    from matplotlib.patches import Patch

    styles = [_STYLES.get(role, _OTHER_STYLE) for role in roles]
    patches = [Patch(facecolor=c, hatch=h, edgecolor="white", lw=0) for c, h in styles]
    names = [plot_label(role) for role in roles]
    figure.legend(patches, names, loc="outside lower left", ncols=len(names), fontsize=8)
