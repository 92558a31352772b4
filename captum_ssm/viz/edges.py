"""Draw messages between tokens as arcs over words, and effects of cutting windows of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..errors import InputError
from .figure import finite_numbers, line_style, new_figure
from .labels import FAMILIES, as_words, plot_label, truncate, widths
from .layers import finish_line_plot
from .text import CELL, LINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..edges import Edge, KnockoutWindows

#: The dark ends of the diverging color map: positive, negative.
FOR, AGAINST = "#542788", "#b35806"
#: Line widths in points of the strongest and of the weakest arc.
_WIDEST, _THINNEST = 4.0, 0.6
#: Height in inches of the area for arcs above the words.
_ARC_HEIGHT = 2.1
#: An arc is labeled if its effect is at least this share of the largest effect.
_LABELED_SHARE = 0.2
#: Character cells between two words.
_GAP = 1.4
#: Width in character cells of a word that is rotated.
_TURNED_WIDTH = 1.9
#: The greatest number of rotated words in a row.
_MAX_TURNED = int(LINE / _TURNED_WIDTH)
#: Curves over more layers than this have no markers.
_MAX_MARKED = 32


def plot_windows(windows: KnockoutWindows, *, title: str | None = None) -> tuple[Figure, Any]:
    """Draw by layer how an answer's probability changes when edges from kinds of tokens are cut.

    Args:
        windows: a :class:`captum_ssm.edges.KnockoutWindows`; for several examples the mean is
            drawn, with a band of its standard error.
        title: a heading, before the probability in the unchanged model. Default: None.

    Returns:
        The matplotlib figure and its axes.

    Raises:
        InputError: when a number is NaN or infinite.

    Example:
        >>> import torch
        >>> from captum_ssm.edges import KnockoutWindows
        >>> from captum_ssm.viz import plot_windows
        >>> without = torch.tensor([[[0.8], [0.2]]])
        >>> found = KnockoutWindows(("subject",), ("0", "1"), 1, torch.tensor([0.8]), without)
        >>> figure, axis = plot_windows(found)
        >>> axis.get_title(loc="left"), axis.lines[-1].get_ydata().round().tolist()
        ('probability of the answer: 0.80', [0.0, -75.0])
    """
    change = finite_numbers(windows.change, "windows")  # (K, N, B)
    layers, batch = change.shape[1:]
    figure, axis = new_figure(7.4, 3.6)
    axis.axhline(0, color="0.4", linewidth=1.0, zorder=0)
    positions = range(layers)
    for i, kind in enumerate(windows.kinds):
        style, mean = line_style(i), change[i].mean(-1)
        marker = {"marker": "o", "markersize": 4} if layers <= _MAX_MARKED else {}
        axis.plot(positions, mean.numpy(), label=plot_label(kind), linewidth=1.8, **style, **marker)
        if batch > 1:
            error = change[i].std(-1) / batch**0.5
            band = (mean - error).numpy(), (mean + error).numpy()
            axis.fill_between(positions, *band, color=style["color"], alpha=0.15, linewidth=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    window = windows.window
    xlabel = "layer" if window == 1 else f"middle layer of a window of {window} layers"
    axis.set(xlabel=xlabel, ylabel="relative change in probability (%)")
    unchanged = float(finite_numbers(windows.plain, "windows").mean())
    of_several = f" (mean of {batch} examples)" if batch > 1 else ""
    heading = f"probability of the answer: {unchanged:.2f}{of_several}"
    heading = f"{title} – {heading}" if title else heading
    finish_line_plot(figure, axis, list(windows.kinds), heading)
    return figure, axis


def plot_edges(
    tokens: Sequence[str],
    edges: Sequence[Edge],
    *,
    by_layer: bool = False,
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw edges as arcs over the words of a text, from sources to targets.

    An arc's width shows the effect of its edge. Purple edges increase the output, brown edges
    decrease it. The strongest edges have labels with effects, with ≈ if norms are approximated to
    first order. If the text is too long for one row, words far from all edges are left out.

    Args:
        tokens: the tokens, in reading order; :class:`Tokens` of one word are drawn without a gap.
        edges: the edges of one example, such as ``EdgeEffects(...).attribute(...).top(20)[0]``.
        by_layer: draw one row for each layer that has an edge. Default: False, one row for all.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes, one per row.

    Raises:
        InputError: when there is no edge, or one has an end outside the text.

    Example:
        >>> from captum_ssm.edges import Edge
        >>> from captum_ssm.viz import plot_edges
        >>> edges = [Edge(1, "mixer", 3, 0, 1.5), Edge(1, "mixer", 2, 1, -0.5)]
        >>> figure, (axis,) = plot_edges(["anna", "owns", "the", "lamp"], edges)
        >>> [text.get_text() for text in axis.texts]
        ['+1.5', '−0.5']
    """
    if not edges:
        raise InputError("edges is empty. Pass at least one, such as effects.top(20)[0].")
    for edge in edges:
        outside = [end for end in (edge.source, edge.target) if not 0 <= end < len(tokens)]
        if outside:
            raise InputError(
                f"edges has an end at token {outside[0]}, but tokens has {len(tokens)}. Pass the "
                "tokens of the edges' text."
            )
    effects = finite_numbers([edge.effect for edge in edges], "edges")
    words = WordRow.of(tokens, {end for edge in edges for end in (edge.source, edge.target)})
    layers = sorted({edge.layer for edge in edges})
    rows = [[layer] for layer in layers] if by_layer else [layers]
    label_height = max(map(len, words.labels)) * 0.085 if words.turned else 0.2
    height = (_ARC_HEIGHT + label_height + 0.2 * by_layer) * len(rows) + 0.4 + 0.3 * bool(title)
    figure, axes = new_figure(words.length * CELL[0] + 0.3, height, nrows=len(rows), squeeze=False)
    largest = float(effects.abs().max()) or 1.0
    for axis, shown_layers in zip(axes[:, 0], rows, strict=True):
        set_word_ticks(axis, words)
        arcs = _arcs([edge for edge in edges if edge.layer in shown_layers], words)
        for arc in reversed(arcs):
            _draw_arc(axis, arc, largest)
        labeled = [arc for arc in arcs if abs(arc.edge.effect) >= _LABELED_SHARE * largest]
        _write_effects(axis, labeled, with_layer=len(layers) > 1 and not by_layer)
        if by_layer:
            axis.set_title(f"layer {shown_layers[0]}", size=9, loc="left")
    add_edge_legend(figure, effects, "increases the output", "decreases the output")
    if title:
        figure.suptitle(plot_label(title), x=0.01, ha="left", size=11)
    return figure, axes[:, 0]


class WordRow(NamedTuple):
    """The labels and positions of the words below the arcs of one row.

    Attributes:
        middles: the horizontal center of each shown token.
        halves: half the width above each shown token in which its arcs end.
        ticks: the horizontal centers of all labels, including labels for omitted words.
        labels: the labels.
        turned: whether the labels are rotated.
        length: the row's width in character cells.
    """

    middles: dict[int, float]
    halves: dict[int, float]
    ticks: list[float]
    labels: list[str]
    turned: bool
    length: float

    @classmethod
    def of(cls, tokens: Sequence[str], ends: set[int]) -> WordRow:
        """Lay out the tokens in one row; ``ends`` are the tokens at which an arc ends."""
        words = as_words(tokens)
        texts, joined = [truncate(label) for label in words.labels], set(words.joined)
        gaps = [0 if i in joined else _GAP / 2 for i in range(len(tokens) + 1)]  # in front of each
        cells = widths(texts, joined)
        turned = sum(cells) + 2 * sum(gaps[:-1]) > LINE
        shown = _tokens_near(ends, len(tokens), _MAX_TURNED) if turned else list(range(len(tokens)))
        middles, halves, ticks, labels = {}, {}, [], []
        column, previous = 0.0, -1
        for i in shown:
            if i > previous + 1:  # an ellipsis for the omitted words
                ticks.append(column + _TURNED_WIDTH / 2)
                labels.append("⋮" if turned else "…")
                column += _TURNED_WIDTH
            label_width = (_TURNED_WIDTH - _GAP) if turned else max(2, cells[i])
            gap_before, gap_after = (_GAP / 2, _GAP / 2) if turned else gaps[i : i + 2]
            word_width = gap_before + label_width + gap_after
            middles[i] = column + gap_before + label_width / 2
            halves[i] = 0.3 * word_width
            ticks.append(middles[i])
            labels.append(plot_label(texts[i]))
            column, previous = column + word_width, i
        return cls(middles, halves, ticks, labels, turned, max(column, LINE / 2))


def _tokens_near(ends: set[int], count: int, limit: int) -> list[int]:
    """Return ``ends`` and the tokens nearest to them, together ``limit`` tokens or all ends."""
    distance = [min(abs(token - end) for end in ends) for token in range(count)]
    nearest = sorted(range(count), key=lambda token: (distance[token], token))
    return sorted(nearest[: max(limit, len(ends))])


class _Arc(NamedTuple):
    """The drawn arc of an edge: horizontal positions of both ends, and the height."""

    edge: Edge
    source: float
    target: float
    high: float


def _arcs(edges: Sequence[Edge], words: WordRow) -> list[_Arc]:
    """Return arcs from strongest to weakest; arcs that share a word end side by side."""
    strongest = sorted(edges, key=lambda edge: -abs(edge.effect))
    # for each word: (sort key, index of the edge, whether the word is the edge's target)
    ends_by_word = defaultdict[int, list[tuple[tuple[int, int, int], int, bool]]](list)
    for i, edge in enumerate(strongest):
        # sorted by this key, arcs of one word do not cross: by side, then near ones within far
        # ones, and of arcs between the same words the stronger outside
        far = edge.target - edge.source
        rank = i + 1 if far < 0 else -i - 1
        ends_by_word[edge.target].append(((_sign(-far), far, rank), i, True))
        ends_by_word[edge.source].append(((_sign(far), -far, -rank), i, False))
    positions: dict[tuple[int, bool], float] = {}
    for token, ends in ends_by_word.items():
        for order, (_, i, at_target) in enumerate(sorted(ends)):
            share = 2 * (order + 0.5) / len(ends) - 1  # from -1 at the left to 1
            positions[i, at_target] = words.middles[token] + share * words.halves[token]
    arcs = []
    for i, edge in enumerate(strongest):
        source, target = positions[i, False], positions[i, True]
        arcs.append(_Arc(edge, source, target, (abs(target - source) / words.length) ** 0.6))
    return arcs


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def set_word_ticks(axis: Any, words: WordRow) -> None:
    """Label an axis' ticks with words, and hide all other parts of the axis."""
    axis.set_xlim(-0.3, words.length + 0.3)
    axis.set_ylim(0, 1.15)
    axis.set_yticks([])
    names = {"family": list(FAMILIES), "fontsize": 8.5, "rotation": 90 if words.turned else 0}
    axis.set_xticks(words.ticks, words.labels, **names)
    axis.tick_params(axis="x", length=0, pad=2)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_arc(axis: Any, arc: _Arc, largest: float) -> None:
    """Draw an arc with an arrow head, the wider the closer its effect is to ``largest``."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    size = abs(arc.edge.effect) / largest
    color = FOR if arc.edge.effect >= 0 else AGAINST
    line_width = _THINNEST + (_WIDEST - _THINNEST) * size
    top = arc.high * 4 / 3  # a cubic Bézier curve rises to 3/4 of its inner points
    points = [(arc.source, 0.0), (arc.source, top), (arc.target, top), (arc.target, 0.05)]
    path = Path(points, [Path.MOVETO, *[Path.CURVE4] * 3])
    style = {"edgecolor": color, "linewidth": line_width, "alpha": 0.35 + 0.6 * size}
    axis.add_patch(PathPatch(path, facecolor="none", capstyle="round", **style))
    arrow = {"marker": "v", "markersize": 3 + line_width, "clip_on": False}
    axis.plot(arc.target, 0.03, color=color, alpha=0.5 + 0.5 * size, markeredgewidth=0, **arrow)


def _write_effects(axis: Any, arcs: Sequence[_Arc], *, with_layer: bool) -> None:
    """Write effects above arcs, first to last; labels that would overlap others are left out."""
    from matplotlib.patheffects import withStroke

    boxes: list[tuple[float, float, float]] = []  # of written labels: center, height, half width
    for arc in arcs:
        approximate = "≈" * arc.edge.first_order
        text = f"{approximate}{arc.edge.effect:+.2g}".replace("-", "−")
        text = f"layer {arc.edge.layer}: {text}" if with_layer else text
        middle, half = (arc.source + arc.target) / 2, 0.42 * len(text)
        height = arc.high + 0.07
        if any(abs(middle - x) < half + h and abs(height - y) < 0.09 for x, y, h in boxes):
            continue
        boxes.append((middle, height, half))
        color = FOR if arc.edge.effect >= 0 else AGAINST
        halo = [withStroke(linewidth=2.5, foreground="white")]
        style = {"ha": "center", "va": "center", "fontsize": 7.5, "path_effects": halo}
        axis.text(middle, height, text, color=color, **style)


def add_edge_legend(figure: Figure, effects: Tensor, positive: str, negative: str) -> None:
    """Add a legend for the colors of edges that occur in the figure."""
    from matplotlib.lines import Line2D

    signs = ((FOR, positive, effects >= 0), (AGAINST, negative, effects < 0))
    entries = [(color, name) for color, name, occurs in signs if bool(occurs.any())]
    lines = [Line2D([], [], color=color, label=name, linewidth=2.5) for color, name in entries]
    figure.legend(handles=lines, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
