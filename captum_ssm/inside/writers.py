"""Write graphs to files for other programs.

The JSON format is for circuit-tracer's viewer, and GraphML for networkx, Gephi, Cytoscape and yEd.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from .._files import make_folder, write_whole
from ..errors import DataError, NonFiniteError, OptionError

if TYPE_CHECKING:
    from .graph import Graph

#: Name of the file that lists the graphs of a folder for the viewer.
LISTING = "graph-metadata.json"

#: The path at which the viewer looks for examples of features. At this local path there are none.
#: For a different name the viewer would load examples from a public hub, perhaps of a different
#: model.
_SCAN = "./captum_ssm"
_VERSION = 1

#: The viewer's name for each kind of node. The viewer has no name for constants and shows a label.
_FEATURE_TYPES = {
    "token": "embedding",
    "feature": "cross layer transcoder",
    "direction": "cross layer transcoder",
    "whole": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "constants": "constants",
    "target": "logit",
}


def to_json(graph: Graph, path: str | Path) -> None:
    """Write a graph as circuit-tracer does, and list it in ``graph-metadata.json`` beside it.

    ``circuit-tracer start-server --graph_file_dir FOLDER`` shows the graph. In the file, a node's
    influence is the cumulative share of this node and all stronger nodes, so that the viewer's
    slider hides the weakest nodes first.

    Args:
        graph: the graph.
        path: the .json file, which is overwritten if it exists. A missing folder is created.

    Raises:
        OptionError: when the path does not end in ``.json``, or is ``graph-metadata.json``.
        NonFiniteError: when a number is NaN or infinite.
        DataError: when an existing ``graph-metadata.json`` contains no list of graphs.
        WriteError: when a file cannot be written.

    Example:
        >>> import json, tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.inside.graph import Graph, Node
        >>> from captum_ssm.inside.writers import to_json
        >>> token = Node("token", "", 0, 0, 17, 1.0, 1.0, "lamp")
        >>> target = Node("target", "", 1, 0, 17, 2.5, 1.0, "lamp")
        >>> edges = torch.tensor([[0.0, 0.0], [2.5, 0.0]])  # from the token to the target
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "lamp.json"
        ...     to_json(Graph((token, target), edges, ("lamp",), {}), path)
        ...     json.loads(path.read_text())["links"]
        [{'source': 'E_17_0', 'target': '1_17_0', 'weight': 2.5}]
    """
    path = Path(path)
    if path.suffix != ".json" or path.name == LISTING:
        raise OptionError(
            f"path={str(path)!r} is not accepted. Pass a name that ends in .json, not {LISTING}."
        )
    _refuse_non_finite(graph)
    make_folder(path.parent)
    metadata = {
        "slug": path.stem,
        "scan": _SCAN,
        "transcoder_list": [],
        "prompt_tokens": list(graph.tokens),
        "prompt": " ".join(token.strip() for token in graph.tokens),
        "node_threshold": 1.0,
        "schema_version": _VERSION,
        "scores": dict(graph.scores),
    }
    listing = _with_listing_of(path.parent / LISTING, metadata)
    nodes = _json_nodes(graph)
    content = {
        "metadata": metadata,
        # The viewer starts without a selection.
        "qParams": {
            "pinnedIds": [],
            "supernodes": [],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": nodes,
        "links": [
            {"source": nodes[s]["node_id"], "target": nodes[t]["node_id"], "weight": weight}
            for t, s, weight in _links(graph)
        ],
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")
    write_whole(path.parent / LISTING, json.dumps(listing, indent=2) + "\n")


def _with_listing_of(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a file's list of graphs with one more graph, which replaces one of the same name."""
    try:
        listing = json.loads(path.read_text("utf-8")) if path.exists() else {"graphs": []}
        other_graphs = [graph for graph in listing["graphs"] if graph["slug"] != metadata["slug"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} contains no list of graphs ({type(error).__name__}: {error}). Write to a "
            "different folder, or remove the file."
        ) from None
    return {**listing, "graphs": [*other_graphs, metadata]}


def _json_nodes(graph: Graph) -> list[dict[str, Any]]:
    """Return the nodes as dicts with the names, indices and ids that the viewer expects."""
    probability = graph.scores.get("probability")
    nodes = []
    for node, influence in zip(graph.nodes, _cumulative_shares(graph), strict=True):
        index = 0 if node.index is None else node.index
        # Constants have no token: they are drawn at the start, a target without a token at the end.
        last = len(graph.tokens) - 1 if node.kind == "target" else 0
        position = last if node.position is None else node.position
        layer, feature, clerp = str(node.depth - 1), -1, node.label or node.layer
        # both ids as circuit-tracer forms them for each kind of node
        node_id = f"{layer}_{node.kind}_{position}"
        js_id = f"{layer}_{position}-0"
        if node.kind in ("feature", "direction", "whole"):
            # one number for a layer and a feature, as the viewer expects
            feature = _cantor_pair(node.depth - 1, index)
            node_id, js_id = f"{layer}_{index}_{position}", f"{layer}_{index}-0"
        elif node.kind == "token":
            layer, feature = "E", position
            node_id, js_id = f"E_{index}_{position}", f"E_{index}-{position}"
        elif node.kind == "constants":
            layer, node_id, js_id = "E", f"E_constants_{position}", f"E_constants-{position}"
        elif node.kind == "target":
            layer, feature = str(node.depth), index
            node_id, js_id = f"{layer}_{index}_{position}", f"L_{index}-{position}"
            # The viewer parses the word in quotation marks and the number after "(p=".
            shown_probability = "?" if probability is None else f"{probability:.3f}"
            clerp = f'Output "{node.label}" (p={shown_probability})'
        of_target = node.kind == "target"
        nodes.append(
            {
                "node_id": node_id,
                "feature": feature,
                "layer": layer,
                "ctx_idx": position,
                "feature_type": _FEATURE_TYPES[node.kind],
                "token_prob": (probability or 0.0) if of_target else 0.0,
                "is_target_logit": of_target,
                "run_idx": 0,
                "reverse_ctx_idx": 0,
                "jsNodeId": js_id,
                "clerp": clerp,
                "influence": influence,
                "activation": node.activation,
            }
        )
    return nodes


def _cantor_pair(x: int, y: int) -> int:
    """Combine two integers into one with Cantor's pairing function, which the viewer inverts."""
    return (x + y) * (x + y + 1) // 2 + y


def _cumulative_shares(graph: Graph) -> list[float | None]:
    """Return the share of influence of each node and all stronger nodes; None for the target."""
    shares: list[float | None] = [None] * len(graph.nodes)
    counted = [i for i, node in enumerate(graph.nodes) if node.kind != "target"]
    total = sum(graph.nodes[i].influence for i in counted) or 1.0  # no 0 / 0
    running = 0.0
    for i in sorted(counted, key=lambda i: -graph.nodes[i].influence):
        running += graph.nodes[i].influence
        shares[i] = min(running / total, 1.0)
    return shares


_NAMESPACE = "http://graphml.graphdrawing.org/xmlns"
_NODE_KEYS = {
    "kind": "string",
    "layer": "string",
    "depth": "int",
    "position": "int",
    "index": "long",
    "activation": "double",
    "influence": "double",
    "label": "string",
}
#: Characters that XML does not allow, and carriage returns, which XML parsers change.
_UNWRITABLE = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_graphml(graph: Graph, path: str | Path) -> None:
    """Write a graph as directed GraphML, with all attributes of nodes and the weights of edges.

    The graph's attributes are its scores and ``tokens``, a JSON list of the tokens' texts. A
    character that XML does not allow is written as its code, such as ``\\\\x00``.

    Args:
        graph: the graph.
        path: the file, which is overwritten if it exists. A missing folder is created.

    Raises:
        NonFiniteError: when a number is NaN or infinite.
        WriteError: when the file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.inside.graph import Graph, Node
        >>> from captum_ssm.inside.writers import to_graphml
        >>> token = Node("token", "", 0, 0, 17, 1.0, 1.0, "lamp")
        >>> target = Node("target", "", 1, 0, 17, 2.5, 1.0, "lamp")
        >>> edges = torch.tensor([[0.0, 0.0], [2.5, 0.0]])  # from the token to the target
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "lamp.graphml"
        ...     to_graphml(Graph((token, target), edges, ("lamp",), {}), path)
        ...     '<edge source="n0" target="n1">' in path.read_text()
        True
    """
    path = Path(path)
    _refuse_non_finite(graph)
    make_folder(path.parent)
    root = ElementTree.Element("graphml", xmlns=_NAMESPACE)
    for name, kind in _NODE_KEYS.items():
        _declare(root, "node", name, kind)
    _declare(root, "edge", "weight", "double")
    _declare(root, "graph", "tokens", "string")
    for name in graph.scores:
        _declare(root, "graph", name, "double")

    graph_element = ElementTree.SubElement(root, "graph", edgedefault="directed")
    _add_data(graph_element, "graph", {"tokens": json.dumps(graph.tokens), **graph.scores})
    for i, node in enumerate(graph.nodes):
        values = {name: getattr(node, name) for name in _NODE_KEYS}
        _add_data(ElementTree.SubElement(graph_element, "node", id=f"n{i}"), "node", values)
    for t, s, weight in _links(graph):
        edge = ElementTree.SubElement(graph_element, "edge", source=f"n{s}", target=f"n{t}")
        _add_data(edge, "edge", {"weight": weight})
    ElementTree.indent(root)
    write_whole(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _declare(root: ElementTree.Element, element: str, name: str, kind: str) -> None:
    """Declare an attribute of a kind of element, ``"node"``, ``"edge"`` or ``"graph"``."""
    attributes = {"id": f"{element}-{name}", "for": element, "attr.name": name, "attr.type": kind}
    ElementTree.SubElement(root, "key", attributes)


def _add_data(element: ElementTree.Element, kind: str, values: dict[str, Any]) -> None:
    """Add one element with text for each value that is not None."""
    for name, value in values.items():
        if value is not None:
            data = ElementTree.SubElement(element, "data", key=f"{kind}-{name}")
            data.text = _UNWRITABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", str(value))


def _links(graph: Graph) -> list[tuple[int, int, float]]:
    """Return target, source and weight of each edge that is not 0."""
    targets, sources = graph.edges.nonzero(as_tuple=True)
    weights = graph.edges[targets, sources].tolist()
    return list(zip(targets.tolist(), sources.tolist(), weights, strict=True))


def _refuse_non_finite(graph: Graph) -> None:
    """Raise NonFiniteError if a number is NaN or infinite, which JSON cannot express."""
    for node in graph.nodes:
        if not (math.isfinite(node.activation) and math.isfinite(node.influence)):
            raise NonFiniteError(
                f"graph has a node that is not finite: {node}. Explain a finite output."
            )
    if not bool(graph.edges.isfinite().all()):
        raise NonFiniteError("graph has edges that are NaN or infinite. Explain a finite output.")
    for name, score in graph.scores.items():
        if not math.isfinite(score):
            raise NonFiniteError(f"graph has the score {name!r} = {score}. Pass finite scores.")
