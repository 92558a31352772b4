"""Draw messages between tokens as arcs over words, and effects of cutting windows of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..errors import InputError
from .figure import line_style, new_figure, numbers
from .labels import FAMILIES, as_words, cut, shown, widths
from .layers import finish
from .text import CELL, LINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..edges import Edge, KnockoutWindows

#: The dark ends of the diverging color map: positive, negative.
FOR, AGAINST = "#542788", "#b35806"
#: Line widths in points of the strongest and of the weakest arc.
_WIDEST, _THINNEST = 4.0, 0.6
#: Height in inches of the area for arcs above the words.
_HIGH = 2.1
#: An arc is labeled if its effect is at least this share of the largest effect.
_NUMBERED = 0.2
#: Character cells between two words.
_GAP = 1.4
#: Width in character cells of a word that is rotated.
_TURNED = 1.9
#: The greatest number of rotated words in a row.
_MOST_TURNED = int(LINE / _TURNED)
#: Curves over more layers than this have no markers.
_MOST_MARKED = 32


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
    change = numbers(windows.change, "windows")  # (K, N, B)
    layers, batch = change.shape[1:]
    figure, axis = new_figure(7.4, 3.6)
    axis.axhline(0, color="0.4", linewidth=1.0, zorder=0)
    places = range(layers)
    for i, kind in enumerate(windows.kinds):
        style, mean = line_style(i), change[i].mean(-1)
        marker = {"marker": "o", "markersize": 4} if layers <= _MOST_MARKED else {}
        axis.plot(places, mean.numpy(), label=shown(kind), linewidth=1.8, **style, **marker)
        if batch > 1:
            error = change[i].std(-1) / batch**0.5
            band = (mean - error).numpy(), (mean + error).numpy()
            axis.fill_between(places, *band, color=style["color"], alpha=0.15, linewidth=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    wide = windows.window
    xlabel = "layer" if wide == 1 else f"middle layer of a window of {wide} layers"
    axis.set(xlabel=xlabel, ylabel="relative change in probability (%)")
    plain = float(numbers(windows.plain, "windows").mean())
    of_several = f" (mean of {batch} examples)" if batch > 1 else ""
    said = f"probability of the answer: {plain:.2f}{of_several}"
    finish(figure, axis, list(windows.kinds), f"{title} – {said}" if title else said)
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
    effects = numbers([edge.effect for edge in edges], "edges")
    words = WordRow.of(tokens, {end for edge in edges for end in (edge.source, edge.target)})
    layers = sorted({edge.layer for edge in edges})
    rows = [[layer] for layer in layers] if by_layer else [layers]
    deep = max(map(len, words.labels)) * 0.085 if words.turned else 0.2
    high = (_HIGH + deep + 0.2 * by_layer) * len(rows) + 0.4 + 0.3 * bool(title)
    figure, axes = new_figure(words.length * CELL[0] + 0.3, high, nrows=len(rows), squeeze=False)
    largest = float(effects.abs().max()) or 1.0
    for axis, here in zip(axes[:, 0], rows, strict=True):
        set_words(axis, words)
        arcs = _arcs([edge for edge in edges if edge.layer in here], words)
        for arc in reversed(arcs):
            _draw(axis, arc, largest)
        numbered = [arc for arc in arcs if abs(arc.edge.effect) >= _NUMBERED * largest]
        _number(axis, numbered, named=len(layers) > 1 and not by_layer)
        if by_layer:
            axis.set_title(f"layer {here[0]}", size=9, loc="left")
    explain(figure, effects, "increases the output", "decreases the output")
    if title:
        figure.suptitle(shown(title), x=0.01, ha="left", size=11)
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
        found = as_words(tokens)
        names, joined = [cut(label) for label in found.labels], set(found.joined)
        gaps = [0 if i in joined else _GAP / 2 for i in range(len(tokens) + 1)]  # in front of each
        cells = widths(names, joined)
        turned = sum(cells) + 2 * sum(gaps[:-1]) > LINE
        kept = _near(ends, len(tokens), _MOST_TURNED) if turned else list(range(len(tokens)))
        middles, halves, ticks, labels = {}, {}, [], []
        column, before = 0.0, -1
        for token in kept:
            if token > before + 1:
                ticks.append(column + _TURNED / 2)
                labels.append("⋮" if turned else "…")
                column += _TURNED
            room = (_TURNED - _GAP) if turned else max(2, cells[token])
            front, behind = (_GAP / 2, _GAP / 2) if turned else gaps[token : token + 2]
            wide = front + room + behind
            middles[token] = column + front + room / 2
            halves[token] = 0.3 * wide
            ticks.append(middles[token])
            labels.append(shown(names[token]))
            column, before = column + wide, token
        return cls(middles, halves, ticks, labels, turned, max(column, LINE / 2))


def _near(ends: set[int], count: int, most: int) -> list[int]:
    """Return the ends of edges and the tokens nearest to them, at most ``most`` tokens."""
    distance = [min(abs(token - end) for end in ends) for token in range(count)]
    nearest = sorted(range(count), key=lambda token: (distance[token], token))
    return sorted(nearest[: max(most, len(ends))])


class _Arc(NamedTuple):
    """The drawn arc of an edge: horizontal positions of both ends, and the height."""

    edge: Edge
    source: float
    target: float
    high: float


def _arcs(edges: Sequence[Edge], words: WordRow) -> list[_Arc]:
    """Return arcs from strongest to weakest; arcs that share a word end side by side."""
    strongest = sorted(edges, key=lambda edge: -abs(edge.effect))
    at = defaultdict[int, list[tuple[tuple[int, int, int], int, bool]]](list)
    for i, edge in enumerate(strongest):
        far = edge.target - edge.source
        backwards = 1 if far < 0 else -1
        # sorted so, arcs of one word do not cross: by side, then near ones within far ones, and of
        # arcs between the same words the stronger outside
        at[edge.target].append(((_sign(-far), far, backwards * (i + 1)), i, True))
        at[edge.source].append(((_sign(far), -far, -backwards * (i + 1)), i, False))
    spot: dict[tuple[int, bool], float] = {}
    for token, meeting in at.items():
        for place, (_, i, is_target) in enumerate(sorted(meeting)):
            share = 2 * (place + 0.5) / len(meeting) - 1
            spot[i, is_target] = words.middles[token] + share * words.halves[token]
    found = []
    for i, edge in enumerate(strongest):
        source, target = spot[i, False], spot[i, True]
        found.append(_Arc(edge, source, target, (abs(target - source) / words.length) ** 0.6))
    return found


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def set_words(axis: Any, words: WordRow) -> None:
    """Label an axis' ticks with words, and hide all other parts of the axis."""
    axis.set_xlim(-0.3, words.length + 0.3)
    axis.set_ylim(0, 1.15)
    axis.set_yticks([])
    names = {"family": list(FAMILIES), "fontsize": 8.5, "rotation": 90 if words.turned else 0}
    axis.set_xticks(words.ticks, words.labels, **names)
    axis.tick_params(axis="x", length=0, pad=2)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw(axis: Any, arc: _Arc, largest: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    size = abs(arc.edge.effect) / largest
    color = FOR if arc.edge.effect >= 0 else AGAINST
    wide = _THINNEST + (_WIDEST - _THINNEST) * size
    top = arc.high * 4 / 3  # a cubic Bézier curve rises to 3/4 of its inner points
    points = [(arc.source, 0.0), (arc.source, top), (arc.target, top), (arc.target, 0.05)]
    path = Path(points, [Path.MOVETO, *[Path.CURVE4] * 3])
    looks = {"edgecolor": color, "linewidth": wide, "alpha": 0.35 + 0.6 * size}
    axis.add_patch(PathPatch(path, facecolor="none", capstyle="round", **looks))
    head = {"marker": "v", "markersize": 3 + wide, "clip_on": False}
    axis.plot(arc.target, 0.03, color=color, alpha=0.5 + 0.5 * size, markeredgewidth=0, **head)


def _number(axis: Any, arcs: Sequence[_Arc], *, named: bool) -> None:
    """Write the effects of the strongest edges above the arcs, if there is room."""
    from matplotlib.patheffects import withStroke

    taken: list[tuple[float, float, float]] = []
    for arc in arcs:
        rough = "≈" * arc.edge.first_order
        text = f"{rough}{arc.edge.effect:+.2g}".replace("-", "−")
        text = f"layer {arc.edge.layer}: {text}" if named else text
        middle, half = (arc.source + arc.target) / 2, 0.42 * len(text)
        high = arc.high + 0.07
        if any(abs(middle - m) < half + h and abs(high - y) < 0.09 for m, y, h in taken):
            continue
        taken.append((middle, high, half))
        color = FOR if arc.edge.effect >= 0 else AGAINST
        halo = [withStroke(linewidth=2.5, foreground="white")]
        where = {"ha": "center", "va": "center", "fontsize": 7.5, "path_effects": halo}
        axis.text(middle, high, text, color=color, **where)


def explain(figure: Figure, effects: Tensor, positive: str, negative: str) -> None:
    """Add a legend for the colors of edges that occur in the figure."""
    from matplotlib.lines import Line2D

    said = []
    if bool((effects >= 0).any()):
        said.append((FOR, positive))
    if bool((effects < 0).any()):
        said.append((AGAINST, negative))
    made = [Line2D([], [], color=color, linewidth=2.5) for color, _ in said]
    names = [name for _, name in said]
    figure.legend(made, names, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
