"""Draw attribution graphs: nodes over the words of a text, with contributions as edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..errors import OptionError
from .edges import AGAINST, FOR, WordRow, explain, set_words
from .figure import new_figure, numbers
from .labels import FAMILIES, cut, shown
from .text import CELL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..inside import Graph

#: Inches between rows, and the width in points of the strongest edge.
_ROW, _WIDEST = 1.05, 4.5
#: Areas in square points of the nodes of the greatest and of the least influence.
_LARGEST, _SMALLEST = 170.0, 14.0
#: The smallest share of a node's input that is drawn, and the share of a row's height for nodes.
_LEAST, _SPREAD = 0.03, 0.62


def plot_graph(
    graph: Graph,
    *,
    most: int = 24,
    by: Literal["influence", "relevance"] = "influence",
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw a graph's nodes over the words of the text, a row for each layer, and their edges.

    Sizes of nodes and widths of edges show influence. Purple edges add to their target, brown ones
    subtract. Errors are hollow. If the text is too long for one row, words far from all nodes are
    left out. With ``by="relevance"``, for graphs of whole activations, widths and sizes show the
    relevance of an edge or a node, and edges to a node sum to the node's relevance.

    Args:
        graph: a :class:`captum_ssm.inside.Graph`.
        most: the number of inner nodes to draw, the most influential ones. Default: 24.
        by: the quantity of widths and sizes: ``"influence"``, or ``"relevance"`` for graphs of
            whole activations. Default: ``"influence"``.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axis.

    Raises:
        OptionError: for ``most`` below 1, or ``by="relevance"`` if nodes are features.
        InputError: when a number is NaN or infinite.

    Example:
        >>> import torch
        >>> from captum_ssm import attribution_graph
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.viz import plot_graph
        >>> model, tokenizer = load_bundled()
        >>> words = "anna owns the lamp . ? anna owns the".split()
        >>> ids = torch.tensor([tokenizer.encode(" ".join(words))])
        >>> graph = attribution_graph(
        ...     model, ids, (-1, ids[0, 3]), nodes=["backbone.layers.0"], tokens=words)
        >>> figure, axis = plot_graph(graph)
        >>> [label.get_text() for label in axis.get_yticklabels()]
        ['tokens', 'layers.0', 'target']
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise OptionError(f"most={most!r} is not accepted. Pass an integer of at least 1.")
    _check_by(graph, by)
    edges = numbers(graph.edges, "graph")
    chosen = chosen_nodes(graph, most)
    last = len(graph.nodes) - 1
    words = WordRow.of(graph.tokens, {_column(graph, i) for i in chosen})
    depths = sorted({graph.nodes[i].depth for i in chosen} | {0})
    rows = {depth: row for row, depth in enumerate(depths)}
    figure, axis = new_figure(
        words.length * CELL[0] + 1.4, _ROW * len(rows) + 0.9 + 0.3 * bool(title)
    )
    set_words(axis, words)
    axis.set_ylim(-0.35, len(rows) - 0.4)
    axis.set_yticks(
        range(len(rows)), [_row_name(graph, depth, last) for depth in depths], fontsize=8
    )
    axis.tick_params(axis="y", length=0)
    places = _places(graph, chosen, words, rows)
    influence = torch.tensor([node.influence for node in graph.nodes], dtype=torch.double)
    influence[last] = 1.0
    drawn = links_between(edges, chosen, influence)
    if by == "relevance":
        influence = _relevance(graph, edges)
        drawn = _flow_between(edges, chosen)
    largest = max((carried for *_, carried in drawn), default=0.0) or 1.0
    for source, target, weight, carried in sorted(drawn, key=lambda link: link[-1]):
        share = carried / largest
        color = FOR if weight >= 0 else AGAINST
        (x0, y0), (x1, y1) = places[source], places[target]
        looks = {"linewidth": 0.6 + _WIDEST * share, "alpha": 0.3 + 0.6 * share, "zorder": 1}
        axis.plot([x0, x1], [y0, y1], color=color, solid_capstyle="round", **looks)
    top = float(influence[[i for i in chosen if i != last]].max()) if len(chosen) > 1 else 1.0
    for i in chosen:
        node = graph.nodes[i]
        share = 1.0 if i == last else float(influence[i]) / (top or 1.0)
        face = "white" if node.kind == "error" else "0.25"
        size = _SMALLEST + (_LARGEST - _SMALLEST) * min(share, 1.0)
        axis.scatter(*places[i], s=size, color=face, edgecolor="0.25", linewidth=1.0, zorder=2)
    _label(axis, graph, places, chosen)
    explain(figure, torch.tensor([weight for *_, weight, _ in drawn] or [1.0]), "adds", "subtracts")
    if title:
        figure.suptitle(shown(title), x=0.01, ha="left", size=11)
    return figure, axis


def chosen_nodes(graph: Graph, most: int) -> list[int]:
    """Return the indices of the nodes to draw: the most influential ones and the target."""
    inner = [
        i
        for i, node in enumerate(graph.nodes[:-1])
        if node.kind not in ("token", "constants") and node.influence > 0
    ]
    inner = sorted(inner, key=lambda i: -graph.nodes[i].influence)[:most]
    tokens = [
        i for i, node in enumerate(graph.nodes) if node.kind == "token" and node.influence > 0
    ]
    tokens = sorted(tokens, key=lambda i: -graph.nodes[i].influence)[:most]
    return sorted([*tokens, *inner, len(graph.nodes) - 1])


def _check_by(graph: Graph, by: str) -> None:
    if by not in ("influence", "relevance"):
        raise OptionError(f"by={by!r} is not known. Pass 'influence' or 'relevance'.")
    kinds = {node.kind for node in graph.nodes} & {"feature", "direction"}
    if by == "relevance" and kinds:
        raise OptionError(
            f"by='relevance' is for graphs of whole activations, and this graph has nodes of kind "
            f"{', '.join(sorted(kinds))}, whose units differ. Pass by='influence', or make the "
            "graph with only layers in nodes=[...]."
        )


def _relevance(graph: Graph, edges: Tensor) -> Tensor:
    """Return absolute values (n,): whole activations, and other nodes' sums of outgoing edges."""
    own = torch.tensor([node.activation for node in graph.nodes], dtype=torch.double)
    whole = torch.tensor([node.kind == "whole" for node in graph.nodes])
    return torch.where(whole, own, edges.sum(0)).abs()


def _flow_between(edges: Tensor, chosen: Sequence[int]) -> list[tuple[int, int, float, float]]:
    """Return (source, target, relevance, width) of each link that is wide enough to draw."""
    found = [(s, t, float(edges[t, s])) for t in chosen for s in chosen]
    least = _LEAST * max((abs(weight) for *_, weight in found), default=0.0)
    return [(s, t, w, abs(w)) for s, t, w in found if w and abs(w) >= least]


def _column(graph: Graph, i: int) -> int:
    """Return the token over which a node is drawn; the last token if a node has none."""
    position = graph.nodes[i].position
    return len(graph.tokens) - 1 if position is None else position


def _row_name(graph: Graph, depth: int, last: int) -> str:
    if depth == 0:
        return "tokens"
    if depth == graph.nodes[last].depth:
        return "target"
    layer = next(node.layer for node in graph.nodes if node.depth == depth and node.layer)
    return shown(".".join(layer.split(".")[-2:]))


def _places(
    graph: Graph, chosen: Sequence[int], words: WordRow, rows: dict[int, int]
) -> dict[int, tuple[float, float]]:
    """Return each node's (x, y) in the picture; nodes of one word in one row are stacked."""
    together = defaultdict[tuple[int, int], list[int]](list)
    for i in chosen:
        together[_column(graph, i), graph.nodes[i].depth].append(i)
    found = {}
    for (column, depth), here in together.items():
        for k, i in enumerate(sorted(here, key=lambda i: graph.nodes[i].influence)):
            up = _SPREAD * ((k + 0.5) / len(here) - 0.5) if len(here) > 1 else 0.0
            aside = 0.35 * words.halves[column] * (k % 2 * 2 - 1) if len(here) > 1 else 0.0
            found[i] = (words.middles[column] + aside, rows[depth] + up)
    return found


def links_between(
    edges: Tensor, chosen: Sequence[int], influence: Tensor, least: float = _LEAST
) -> list[tuple[int, int, float, float]]:
    """Return (source, target, contribution, influence) of each edge that is large enough to draw.

    Args:
        edges: the edges of a graph, (n, n); the row is the target.
        chosen: the nodes that are drawn.
        influence: each node's influence, 1 for the target, (n,).
        least: the smallest share of a target's input that is drawn. Default: 0.03.
    """
    sizes = edges.abs().double()
    shares = sizes / sizes.sum(1, keepdim=True).clamp_min(1e-300)
    return [
        (s, t, float(edges[t, s]), float(shares[t, s] * influence[t]))
        for t in chosen
        for s in chosen
        if float(shares[t, s]) >= least
    ]


def _label(
    axis: Any,
    graph: Graph,
    places: dict[int, tuple[float, float]],
    chosen: Sequence[int],
) -> None:
    """Write the labels of nodes, the most influential first, if there is room."""
    from matplotlib.patheffects import withStroke

    taken: list[tuple[float, float, float]] = []
    for i in sorted(chosen, key=lambda i: -graph.nodes[i].influence - (i == len(graph.nodes) - 1)):
        node, (x, y) = graph.nodes[i], places[i]
        if node.kind == "token" or not node.label:
            continue
        text = shown(cut(node.label))
        left, half = x + 1.0, 0.36 * len(text)
        middle = left + half
        if any(abs(middle - m) < half + h and abs(y - high) < 0.13 for m, high, h in taken):
            continue
        taken.append((middle, y, half))
        halo = [withStroke(linewidth=2.5, foreground="white")]
        names = {"family": list(FAMILIES), "fontsize": 7, "path_effects": halo, "zorder": 3}
        axis.text(left, y, text, ha="left", va="center", **names)
