"""Draw attribution graphs: nodes over the words of a text, with contributions as edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..errors import OptionError
from .edges import AGAINST, FOR, WordRow, add_edge_legend, set_word_ticks
from .figure import finite_numbers, new_figure
from .labels import FAMILIES, plot_label, truncate
from .text import CELL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..inside import Graph

#: Inches between rows, and the width in points of the strongest edge.
_ROW, _WIDEST = 1.05, 4.5
#: Areas in square points of the nodes of the greatest and of the least influence.
_LARGEST, _SMALLEST = 170.0, 14.0
#: The smallest share of a node's input that is drawn, and the share of a row's height for nodes.
_MIN_SHARE, _SPREAD = 0.03, 0.62


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
    edges = finite_numbers(graph.edges, "graph")
    indices = nodes_to_draw(graph, most)
    last = len(graph.nodes) - 1
    words = WordRow.of(graph.tokens, {_token_of(graph, i) for i in indices})
    depths = sorted({graph.nodes[i].depth for i in indices} | {0})
    rows = {depth: row for row, depth in enumerate(depths)}
    height = _ROW * len(rows) + 0.9 + 0.3 * bool(title)
    figure, axis = new_figure(words.length * CELL[0] + 1.4, height)
    set_word_ticks(axis, words)
    axis.set_ylim(-0.35, len(rows) - 0.4)
    row_names = [_row_name(graph, depth, last) for depth in depths]
    axis.set_yticks(range(len(rows)), row_names, fontsize=8)
    axis.tick_params(axis="y", length=0)
    positions = _node_positions(graph, indices, words, rows)
    influence = torch.tensor([node.influence for node in graph.nodes], dtype=torch.double)
    influence[last] = 1.0
    links = links_between(edges, indices, influence)
    if by == "relevance":
        influence = _relevance(graph, edges)
        links = _flow_between(edges, indices)
    largest = max((strength for *_, strength in links), default=0.0) or 1.0
    for source, target, weight, strength in sorted(links, key=lambda link: link[-1]):
        share = strength / largest
        color = FOR if weight >= 0 else AGAINST
        (x0, y0), (x1, y1) = positions[source], positions[target]
        style = {"linewidth": 0.6 + _WIDEST * share, "alpha": 0.3 + 0.6 * share, "zorder": 1}
        axis.plot([x0, x1], [y0, y1], color=color, solid_capstyle="round", **style)
    inner = [i for i in indices if i != last]
    greatest = float(influence[inner].max()) if inner else 1.0
    for i in indices:
        node = graph.nodes[i]
        share = 1.0 if i == last else float(influence[i]) / (greatest or 1.0)
        face = "white" if node.kind == "error" else "0.25"
        size = _SMALLEST + (_LARGEST - _SMALLEST) * min(share, 1.0)
        axis.scatter(*positions[i], s=size, color=face, edgecolor="0.25", linewidth=1.0, zorder=2)
    _write_labels(axis, graph, positions, indices)
    weights = torch.tensor([weight for *_, weight, _ in links] or [1.0])
    add_edge_legend(figure, weights, "adds", "subtracts")
    if title:
        figure.suptitle(plot_label(title), x=0.01, ha="left", size=11)
    return figure, axis


def nodes_to_draw(graph: Graph, most: int) -> list[int]:
    """Return indices of nodes to draw: the target, and up to ``most`` tokens and inner nodes."""
    nodes, last = graph.nodes, len(graph.nodes) - 1
    ordered = [i for i in range(last) if nodes[i].influence > 0 and nodes[i].kind != "constants"]
    ordered.sort(key=lambda i: -nodes[i].influence)
    tokens = [i for i in ordered if nodes[i].kind == "token"][:most]
    inner = [i for i in ordered if nodes[i].kind != "token"][:most]
    return sorted([*tokens, *inner, last])


def _check_by(graph: Graph, by: str) -> None:
    """Raise OptionError unless plot_graph can draw ``by`` for the kinds of the graph's nodes."""
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
    """Return each node's absolute relevance (n,): an activation, or the sum of outgoing edges."""
    activations = torch.tensor([node.activation for node in graph.nodes], dtype=torch.double)
    is_whole = torch.tensor([node.kind == "whole" for node in graph.nodes])
    return torch.where(is_whole, activations, edges.sum(0)).abs()


def _flow_between(edges: Tensor, indices: Sequence[int]) -> list[tuple[int, int, float, float]]:
    """Return (source, target, relevance, width) of each edge that is wide enough to draw."""
    links = [(s, t, float(edges[t, s])) for t in indices for s in indices]
    threshold = _MIN_SHARE * max((abs(weight) for *_, weight in links), default=0.0)
    return [(s, t, w, abs(w)) for s, t, w in links if w and abs(w) >= threshold]


def _token_of(graph: Graph, i: int) -> int:
    """Return the token over which a node is drawn; the last token if a node has none."""
    position = graph.nodes[i].position
    return len(graph.tokens) - 1 if position is None else position


def _row_name(graph: Graph, depth: int, last: int) -> str:
    """Return the label of a row: the end of its layer's name; ``last`` is the target's index."""
    if depth == 0:
        return "tokens"
    if depth == graph.nodes[last].depth:
        return "target"
    layer = next(node.layer for node in graph.nodes if node.depth == depth and node.layer)
    return plot_label(".".join(layer.split(".")[-2:]))


def _node_positions(
    graph: Graph, indices: Sequence[int], words: WordRow, rows: dict[int, int]
) -> dict[int, tuple[float, float]]:
    """Return each node's (x, y) in the picture; nodes of one word in one row are stacked."""
    nodes_by_word = defaultdict[tuple[int, int], list[int]](list)
    for i in indices:
        nodes_by_word[_token_of(graph, i), graph.nodes[i].depth].append(i)
    positions = {}
    for (column, depth), nodes in nodes_by_word.items():
        for k, i in enumerate(sorted(nodes, key=lambda i: graph.nodes[i].influence)):
            # stacked from the row's lower to its upper part, by turns left and right of the word
            dy = _SPREAD * ((k + 0.5) / len(nodes) - 0.5) if len(nodes) > 1 else 0.0
            dx = 0.35 * words.halves[column] * (k % 2 * 2 - 1) if len(nodes) > 1 else 0.0
            positions[i] = (words.middles[column] + dx, rows[depth] + dy)
    return positions


def links_between(
    edges: Tensor, indices: Sequence[int], influence: Tensor, least: float = _MIN_SHARE
) -> list[tuple[int, int, float, float]]:
    """Return (source, target, contribution, influence) of each edge that is large enough to draw.

    Rows of ``edges`` (n, n) are targets. ``influence`` (n,) is 1 for the graph's target. ``least``
    is the smallest share of a target's input that is drawn.
    """
    sizes = edges.abs().double()
    shares = sizes / sizes.sum(1, keepdim=True).clamp_min(1e-300)
    return [
        (s, t, float(edges[t, s]), float(shares[t, s] * influence[t]))
        for t in indices
        for s in indices
        if float(shares[t, s]) >= least
    ]


def _write_labels(
    axis: Any, graph: Graph, positions: dict[int, tuple[float, float]], indices: Sequence[int]
) -> None:
    """Write labels beside nodes: the target's, then the most influential ones that have room."""
    from matplotlib.patheffects import withStroke

    boxes: list[tuple[float, float, float]] = []  # of written labels: center, height, half width
    for i in sorted(indices, key=lambda i: -graph.nodes[i].influence - (i == len(graph.nodes) - 1)):
        node, (x, y) = graph.nodes[i], positions[i]
        if node.kind == "token" or not node.label:
            continue
        text = plot_label(truncate(node.label))
        x_left, half = x + 1.0, 0.36 * len(text)
        middle = x_left + half
        if any(abs(middle - m) < half + h and abs(y - above) < 0.13 for m, above, h in boxes):
            continue
        boxes.append((middle, y, half))
        halo = [withStroke(linewidth=2.5, foreground="white")]
        style = {"family": list(FAMILIES), "fontsize": 7, "path_effects": halo, "zorder": 3}
        axis.text(x_left, y, text, ha="left", va="center", **style)
