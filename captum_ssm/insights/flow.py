"""Compute the flow of relevance from a text's words through the layers to a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..viz.html.example import ShownExample, find_subject
from ..viz.html.graph import graph_of
from ..viz.html.outline import outline

#: The number of graph nodes that are traced back to their inputs.
_FOLLOWED = 24


class Flow(NamedTuple):
    """The flow of relevance through a model's layers to a class.

    Attributes:
        tokens: the number of tokens in the model's input.
        graph: the nodes and edges from :func:`~captum_ssm.viz.html.graph.graph_of`.
    """

    tokens: int
    graph: Mapping[str, Any]


def flow_of(model: Any, ids: Tensor, target: Any, additional: tuple[Any, ...]) -> Flow:
    """Return the flow of relevance from token ids through a model's layers to a target."""
    subject = find_subject(model, None, None, None, None)
    example = ShownExample(ids, target, additional, None)
    outlined = outline(subject, example)
    graph = graph_of(subject, example, outlined, _FOLLOWED)
    for node in graph["nodes"]:
        if node["position"] is not None:
            node["position"] = outlined.unpadded[node["position"]]
    return Flow(outlined.layers[0].tokens, graph)
