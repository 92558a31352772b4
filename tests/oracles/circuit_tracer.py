"""The format of circuit-tracer's graphs, as facts: which keys there are, and of which types.

Taken by hand from version 0.5.0 of circuit-tracer: from its models of a graph's file
(``frontend/graph_models.py``), what fills them (``utils/create_graph_files.py``), and what its
viewer reads of them (``frontend/assets/attribution_graph/util-cg.js`` and ``init-cg.js``).
"""

from __future__ import annotations

from typing import Any

#: By part of the file, the type of every key that must be there; several where one may be null.
METADATA = {
    "slug": str, "scan": str, "transcoder_list": list, "prompt_tokens": list, "prompt": str,
    "node_threshold": float, "schema_version": int,
}  # fmt: skip
QPARAMS = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE = {
    "node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str,
    "token_prob": float, "is_target_logit": bool, "run_idx": int, "reverse_ctx_idx": int,
    "jsNodeId": str, "clerp": str, "influence": (float, type(None)), "activation": float,
}  # fmt: skip
LINK = {"source": str, "target": str, "weight": float}

FEATURE, ERROR = "cross layer transcoder", "mlp reconstruction error"
TOKEN, LOGIT = "embedding", "logit"


def complaints(content: dict[str, Any]) -> list[str]:
    """What of a file the viewer could not read; empty if all is well."""
    found = _wrong("metadata", content["metadata"], METADATA)
    found += _wrong("qParams", content["qParams"], QPARAMS)
    nodes, links = content["nodes"], content["links"]
    tokens = content["metadata"]["prompt_tokens"]
    for node in nodes:
        found += _wrong(node.get("node_id", "node"), node, NODE)
        found += [] if 0 <= node["ctx_idx"] < len(tokens) else [f"{node['node_id']}: no token"]
        # it reads "Emb" of the first, and a number of all others
        found += [] if node["layer"] == "E" or node["layer"].isdigit() else [node["layer"]]
        # a logit's label is cut at these
        if node["feature_type"] == LOGIT and not all(x in node["clerp"] for x in ('"', "(p=", ")")):
            found.append(f"{node['node_id']}: {node['clerp']}")
    ids = [node["node_id"] for node in nodes]
    # it looks nodes up by the first, and shares labels and colours between nodes of the second
    shown = [(n["layer"], n["feature"], n["ctx_idx"]) for n in nodes if n["feature_type"] != ERROR]
    for name, keys in (("ids", ids), ("features", shown)):
        found += [] if len(set(keys)) == len(keys) else [f"the same {name} twice"]
    for link in links:
        found += _wrong("link", link, LINK)
        found += [end for end in (link["source"], link["target"]) if end not in ids]
    return found


def unpaired(number: int) -> tuple[int, int]:
    """What Cantor's pairing made a feature's number of: its layer and its index."""
    diagonal = 0
    while (diagonal + 1) * (diagonal + 2) // 2 <= number:
        diagonal += 1
    index = number - diagonal * (diagonal + 1) // 2
    return diagonal - index, index


def _wrong(what: str, held: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [f"{what}: {key}" for key, kind in wanted.items() if not _is(held.get(key, ...), kind)]


def _is(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
