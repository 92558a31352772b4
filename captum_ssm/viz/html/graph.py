"""Make a report's attribution graph of words, whole activations of blocks, and the target.

Shapes: L tokens, including padding; n nodes of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from torch import nn

from ...errors import CaptumSSMError, LayerError
from ...inside import Graph, attribution_graph
from ...tracing import find_mixers
from ..graphs import nodes_to_draw
from .example import ShownExample, Subject
from .outline import Outline
from .page import Facts

#: The largest number of rows between the words and the target.
_MAX_ROWS = 12
#: The largest number of nodes of a graph, whose edges are stored as a square matrix.
_MAX_NODES = 4000
#: The largest number of links in a page for each activation that is followed.
_LINKS_PER_NODE = 10
#: Kinds of nodes with incoming edges and an activation.
_FOLLOWED_KINDS = ("whole", "target")
#: Source, target, and the relevance that the source contributes to the target.
Link: TypeAlias = tuple[int, int, float]


def graph_of(
    subject: Subject,
    example: ShownExample,
    outline: Outline,
    count: int,
    moves: Sequence[float] | None = None,
) -> Facts:
    """Return the graph of the activations that contribute most, or why there is no graph.

    ``count`` is the number of activations to follow, ``moves`` the relevance that each layer moves
    between tokens. If not all blocks can be drawn, the blocks that move most are drawn; evenly
    spaced blocks if ``moves`` is None.
    """
    facts: Facts = {key: [] for key in ("rows", "nodes", "links", "path")}
    facts |= {"kind": "blocks", "places": 0, "how": "", "obstacle": None}
    if count == 0:
        return facts
    tokens = outline.layers[0].tokens
    rows = min(_MAX_ROWS, _MAX_NODES // tokens - 1)
    if example.is_image:
        return facts | {"obstacle": "Graphs are made only for texts."}
    if rows < 1:
        limit = _MAX_NODES // 2
        return facts | {"obstacle": f"The text has {tokens} tokens; at most {limit} fit a graph."}
    obstacle = ""
    for kind, candidates in _row_candidates(subject, outline):
        try:
            graph = attribution_graph(
                subject.forward_func,
                example.inputs,
                outline.target,
                example.additional or None,
                nodes=_select_rows(candidates, rows, moves),
                top=count,
                keep=None,
                model=subject.module,
                layers=subject.layers,
            )
        except LayerError as error:  # a block may run several times, and its mixer only once
            obstacle = obstacle or str(error)
        except CaptumSSMError as error:  # the page then shows the other parts
            return facts | {"obstacle": str(error)}
        else:
            by_moves = moves is not None and len(moves) == len(candidates)
            how = "which move most relevance between tokens" if by_moves else "evenly spaced"
            about = {"kind": kind, "places": len(candidates), "how": how}
            return facts | about | _graph_facts(graph, outline, count)
    return facts | {"obstacle": obstacle}


def _row_candidates(subject: Subject, outline: Outline) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield candidates for the graph's rows, as (kind, modules): first blocks, then mixers."""
    by_name = {
        name: mixer for mixer in find_mixers(subject.module, subject.layers) for name in mixer.names
    }
    mixers = [by_name[layer.name] for layer in outline.layers]
    # the whole model's output is not an intermediate step
    if all(len(mixer.blocks) == 1 and mixer.blocks[0] is not subject.module for mixer in mixers):
        yield "blocks", list(dict.fromkeys(mixer.blocks[0] for mixer in mixers))
    yield "mixers", list(dict.fromkeys(mixer.module for mixer in mixers))


def _select_rows(
    modules: Sequence[nn.Module], limit: int, moves: Sequence[float] | None
) -> list[nn.Module]:
    """Select ``limit`` modules or fewer: the last, and others by ``moves`` or evenly spaced."""
    count = len(modules)
    if moves is not None and len(moves) == count > limit:
        strongest = sorted(range(count - 1), key=lambda i: -moves[i])[: limit - 1]
        return [modules[i] for i in (*sorted(strongest), count - 1)]
    return [modules[-(-(i + 1) * count // min(count, limit)) - 1] for i in range(min(count, limit))]


def _graph_facts(graph: Graph, outline: Outline, count: int) -> Facts:
    """Return the nodes and links to draw as JSON values, with tokens counted without padding."""
    index = {id(node): i for i, node in enumerate(graph.nodes)}
    path = [index[id(node)] for node in graph.path()]
    last = len(graph.nodes) - 1
    indices = sorted({*nodes_to_draw(graph, count), *path})
    links = _strongest_links(graph, indices, path, count)
    indices = sorted({last, *(end for link in links for end in link[:2])})  # without isolated nodes
    outgoing = graph.edges.sum(0).tolist()
    constants = graph.edges[:, last - 1].tolist()  # the node before the target
    position_of = {token: position for position, token in enumerate(outline.unpadded)}
    rows = {node.depth: node.layer for node in graph.nodes if node.layer}
    page_index = {node: i for i, node in enumerate(indices)}
    nodes = [
        {
            "kind": node.kind,
            "row": node.depth,
            "position": None if node.position is None else position_of.get(node.position),
            # for a node that was not followed, its contribution to all followed nodes
            "value": _rounded(node.activation if node.kind in _FOLLOWED_KINDS else outgoing[i]),
            "constants": _rounded(constants[i]),
        }
        for i, node in ((i, graph.nodes[i]) for i in indices)
    ]
    return {
        "rows": [rows[depth] for depth in sorted(rows)],
        "nodes": nodes,
        "links": [
            {"source": page_index[source], "target": page_index[target], "weight": _rounded(weight)}
            for source, target, weight in links
        ],
        "path": [
            {"node": page_index[i], "adds": _rounded(float(graph.edges[target, i]))}
            for i, target in pairwise(path)
        ],
    }


def _strongest_links(
    graph: Graph, indices: Sequence[int], path: Sequence[int], count: int
) -> list[Link]:
    """Return the strongest links and the links of ``path``, without links that miss the target."""
    pairs = [(s, t) for t in indices for s in indices if bool(graph.edges[t, s])]
    links = [(s, t, float(graph.edges[t, s])) for s, t in pairs]
    path_links = set(pairwise(path))
    strongest = sorted(links, key=lambda link: -abs(link[-1]))[: _LINKS_PER_NODE * count]
    strongest += [link for link in links if link[:2] in path_links and link not in strongest]
    reached, leading = {len(graph.nodes) - 1}, []
    # from the target down: a link is useful only if its own target is reached
    for link in sorted(strongest, key=lambda link: -graph.nodes[link[1]].depth):
        if link[1] in reached:
            reached.add(link[0])
            leading.append(link)
    return leading


def _rounded(number: float) -> float:
    return float(f"{number:.7g}")
