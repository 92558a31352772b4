"""Make a report's attribution graph of words, whole activations of blocks, and the target.

Shapes: L tokens, including padding; n nodes of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from torch import nn

from ...errors import CaptumSSMError, LayerError
from ...inside import Graph, attribution_graph
from ...tracing import find_mixers
from ..graphs import nodes_to_draw
from .example import ShownExample, Subject
from .outline import Outline

#: The largest number of rows between the words and the target.
_ROWS = 12
#: The largest number of nodes of a graph, whose edges are stored as a square matrix.
_LARGEST = 4000
#: The largest number of links in a page for each activation that is followed.
_LINKS = 10
#: Kinds of nodes with incoming edges and an activation.
_ENTERED = ("whole", "target")
#: Source, target, and the relevance that the source contributes to the target.
Link: TypeAlias = tuple[int, int, float]


def graph_of(
    subject: Subject,
    example: ShownExample,
    known: Outline,
    count: int,
    moves: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the graph of the activations that contribute most, or why there is no graph.

    Args:
        subject, example, known: the model, the example, and the facts from its forward run.
        count: number of activations to follow.
        moves: relevance that each layer moves between tokens. If not all blocks can be drawn, the
            blocks that move most are drawn. Default: None, evenly spaced blocks.
    """
    told: dict[str, Any] = {key: [] for key in ("rows", "nodes", "links", "path")}
    told |= {"kind": "blocks", "places": 0, "how": "", "obstacle": None}
    if count == 0:
        return told
    tokens = known.layers[0].tokens
    rows = min(_ROWS, _LARGEST // tokens - 1)
    if example.is_image:
        return told | {"obstacle": "Graphs are made only for texts."}
    if rows < 1:
        most = _LARGEST // 2
        return told | {"obstacle": f"The text has {tokens} tokens; at most {most} fit a graph."}
    obstacle = ""
    for kind, places in _places(subject, known):
        try:
            graph = attribution_graph(
                subject.forward_func,
                example.inputs,
                known.target,
                example.additional or None,
                nodes=_chosen(places, rows, moves),
                top=count,
                keep=None,
                model=subject.module,
                layers=subject.layers,
            )
        except LayerError as error:  # a block that runs several times has a mixer that may not
            obstacle = obstacle or str(error)
        except CaptumSSMError as error:  # which leaves all else to be shown
            return told | {"obstacle": str(error)}
        else:
            fits = moves is not None and len(moves) == len(places)
            how = "which move most relevance between tokens" if fits else "evenly spaced"
            about = {"kind": kind, "places": len(places), "how": how}
            return told | about | _drawn(graph, known, count)
    return told | {"obstacle": obstacle}


def _places(subject: Subject, known: Outline) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield candidates for the graph's rows, as (kind, modules): first blocks, then mixers."""
    by_name = {
        name: mixer for mixer in find_mixers(subject.module, subject.layers) for name in mixer.names
    }
    mixers = [by_name[layer.name] for layer in known.layers]
    # the whole model's output is not an intermediate step
    if all(len(mixer.blocks) == 1 and mixer.blocks[0] is not subject.module for mixer in mixers):
        yield "blocks", list(dict.fromkeys(mixer.blocks[0] for mixer in mixers))
    yield "mixers", list(dict.fromkeys(mixer.module for mixer in mixers))


def _chosen(
    places: Sequence[nn.Module], most: int, moves: Sequence[float] | None
) -> list[nn.Module]:
    """Select ``most`` modules or fewer: the last, and others by ``moves`` or evenly spaced."""
    count = len(places)
    if moves is not None and len(moves) == count > most:
        best = sorted(range(count - 1), key=lambda i: -moves[i])[: most - 1]
        return [places[i] for i in (*sorted(best), count - 1)]
    return [places[-(-(i + 1) * count // min(count, most)) - 1] for i in range(min(count, most))]


def _drawn(graph: Graph, known: Outline, count: int) -> dict[str, Any]:
    """Return the nodes and links to draw as JSON values, with tokens counted without padding."""
    number = {id(node): i for i, node in enumerate(graph.nodes)}
    path = [number[id(node)] for node in graph.path()]
    last = len(graph.nodes) - 1
    chosen = sorted({*nodes_to_draw(graph, count), *path})
    links = _strongest(graph, chosen, path, count)
    chosen = sorted({last, *(end for link in links for end in link[:2])})
    added = graph.edges.sum(0).tolist()
    constants = graph.edges[:, last - 1].tolist()
    place = {token: position for position, token in enumerate(known.real)}
    rows = {node.depth: node.layer for node in graph.nodes if node.layer}
    drawn = {node: i for i, node in enumerate(chosen)}
    nodes = [
        {
            "kind": node.kind,
            "row": node.depth,
            "position": None if node.position is None else place.get(node.position),
            # for a node that was not followed, its contribution to all followed nodes
            "value": _short(node.activation if node.kind in _ENTERED else added[i]),
            "constants": _short(constants[i]),
        }
        for i, node in ((i, graph.nodes[i]) for i in chosen)
    ]
    return {
        "rows": [rows[depth] for depth in sorted(rows)],
        "nodes": nodes,
        "links": [
            {"source": drawn[s], "target": drawn[t], "weight": _short(w)} for s, t, w in links
        ],
        "path": [
            {"node": drawn[i], "adds": _short(float(graph.edges[after, i]))}
            for i, after in pairwise(path)
        ],
    }


def _strongest(graph: Graph, chosen: Sequence[int], path: Sequence[int], count: int) -> list[Link]:
    """Return the links of most relevance between ``chosen`` nodes that lead to the target."""
    links = [
        (s, t, float(graph.edges[t, s])) for t in chosen for s in chosen if bool(graph.edges[t, s])
    ]
    along = set(pairwise(path))
    strongest = sorted(links, key=lambda link: -abs(link[-1]))[: _LINKS * count]
    strongest += [link for link in links if link[:2] in along and link not in strongest]
    reached, found = {len(graph.nodes) - 1}, []
    for link in sorted(strongest, key=lambda link: -graph.nodes[link[1]].depth):
        if link[1] in reached:
            reached.add(link[0])
            found.append(link)
    return found


def _short(number: float) -> float:
    return float(f"{number:.7g}")
