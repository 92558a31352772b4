"""Graphs of the direct contributions between tokens, features and an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..attr.engine.result import Result, part
from ..errors import OptionError
from .influence import influences, scores
from .writers import to_graphml, to_json

Kind = Literal["token", "feature", "direction", "whole", "error", "constants", "target"]


@part
@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        kind: ``"token"`` of the input, ``"feature"`` of a dictionary, ``"direction"`` of the user,
            ``"whole"`` activation, ``"error"`` (the difference between an activation and the sum of
            its features), ``"constants"`` or ``"target"``.
        layer: the name of the node's layer; empty for tokens, constants and the target.
        depth: 0 for tokens; 1, 2, ... for layers in the order of the run; one more for the target.
        position: the position of the token; None for constants, and for a target without a token.
        index: the index of the feature, head, class, or token in the vocabulary. Default: None.
        activation: a feature's value, a whole activation's contribution to the target, or an
            error's norm.
        influence: the share of the target that passes through the node, 0 to 1.
        label: the displayed name.
    """

    kind: Kind
    layer: str
    depth: int
    position: int | None
    index: int | None
    activation: float
    influence: float
    label: str


@dataclass(frozen=True, eq=False)
class Graph(Result):
    """A weighted graph of the direct contributions between the nodes of a run.

    Attributes:
        nodes: the n nodes: tokens, features, errors, constants, and as the last one the target.
        edges: contributions (n, n). ``edges[t, s]`` is the contribution of node s to node t,
            without paths through other nodes. The row of a node sums to the node's activation,
            unless the graph was pruned.
        tokens: the text of the token at each position.
        scores: ``kept``, the share of influence that remains after pruning. ``completeness``, the
            share of the nodes' inputs, weighted by influence, that does not come from errors.
            ``replacement``, the tokens' share of the influence of tokens and errors.
        writes: for each node, the vector that the node adds to the activation of its layer; None
            for tokens, constants and the target.

    Example:
        >>> import torch
        >>> from captum_ssm import attribution_graph
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> mixers = ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
        >>> graph = attribution_graph(model, ids, target=(-1, 5), nodes=mixers, keep=None)
        >>> row = graph.edges[-1]
        >>> graph.nodes[-1].kind, bool((row.sum() - graph.nodes[-1].activation).abs() < 1e-4)
        ('target', True)
    """

    nodes: tuple[Node, ...]
    edges: Tensor
    tokens: tuple[str, ...]
    scores: Mapping[str, float]
    writes: tuple[Tensor | None, ...] = ()

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {score:.2g}" for name, score in self.scores.items())
        return f"Graph({len(self.nodes)} nodes, {int((self.edges != 0).sum())} edges: {scores})"

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict of attributes for each node."""
        return [asdict(node) for node in self.nodes]

    def effects(self) -> Tensor:
        """Return each node's contribution to the target over all paths in the graph, (n,)."""
        sizes = torch.tensor([node.activation for node in self.nodes], dtype=torch.double)
        inner = torch.tensor([node.kind in _ENTERED for node in self.nodes]) & (sizes != 0)
        edges = self.edges.cpu().double()
        # contributions per unit of activation; a path's contribution is a product of them
        shares = torch.where(inner, 1 / sizes, torch.zeros_like(sizes))[:, None] * edges
        row = edges[-1]  # over paths of one edge, then of two, and so on
        total = torch.zeros_like(row)
        for _ in self.nodes:  # at most as long as the longest path
            if not bool(row.any()):
                break
            total, row = total + row, row @ shares
        return total

    def to_json(self, path: str | Path) -> None:
        """Write the graph as JSON for circuit-tracer's viewer, see :func:`.inside.to_json`."""
        to_json(self, path)

    def to_graphml(self, path: str | Path) -> None:
        """Write the graph to a GraphML file, see :func:`.inside.to_graphml`."""
        to_graphml(self, path)

    def pruned(self, keep: float = 0.8, keep_edges: float = 0.98) -> Graph:
        """Return a graph with only the nodes and edges of largest influence.

        Args:
            keep: the share of the influence of features and errors that remains. Tokens, constants
                and the target are never removed. Default: 0.8.
            keep_edges: the share of the edges' influence that remains; other edges become 0.
                Default: 0.98.
        """
        check_share("keep", keep)
        check_share("keep_edges", keep_edges)
        node_indices, kept_share = strongest(self.nodes, keep)
        edges = self.edges[node_indices][:, node_indices]
        nodes = tuple(self.nodes[i] for i in node_indices.tolist())
        writes = tuple(self.writes[i] for i in node_indices.tolist()) if self.writes else ()
        smaller = Graph(nodes, edges, self.tokens, {"kept": kept_share}, writes)
        return with_strongest_edges(smaller, keep_edges)

    def path(self, start: int | None = None) -> list[Node]:
        """Return the path with the largest contribution from a token to the target.

        A path's size is a product over edges of the edge's share of its end node's total input.

        Args:
            start: the position of the token at which the path begins. Default: None, any token.
        """
        if start is not None and not -len(self.tokens) <= start < len(self.tokens):
            raise OptionError(
                f"start={start} is not a position in {len(self.tokens)} tokens. Pass a number from "
                f"0 to {len(self.tokens) - 1}, or None."
            )
        weights, _ = influences(self.edges, _has_influence(self.nodes))
        # from the target down: best[i] is the size of the best path from node i to the target
        order = sorted(range(len(self.nodes)), key=lambda i: -self.nodes[i].depth)
        best = torch.zeros(len(self.nodes), dtype=torch.double)
        following = [-1] * len(self.nodes)
        best[-1] = 1.0
        for node in order:
            if best[node] == 0:
                continue
            for source in (weights[node] > 0).nonzero()[:, 0].tolist():
                size = float(best[node] * weights[node, source])
                if size > best[source]:
                    best[source], following[source] = size, node
        tokens = _of_kind(self.nodes, "token").double() * best
        if start is not None:
            is_start = [node.position == start % len(self.tokens) for node in self.nodes]
            tokens = tokens * torch.tensor(is_start)
        if not bool(tokens.any()):
            return [self.nodes[-1]]
        path = [int(tokens.argmax())]
        while following[path[-1]] >= 0:
            path.append(following[path[-1]])
        return [self.nodes[i] for i in path]


#: Kinds of nodes with incoming edges, except the target.
_ENTERED = ("feature", "direction", "whole")
#: Kinds of nodes that may be pruned.
_INNER = (*_ENTERED, "error")


def check_share(name: str, value: Any) -> None:
    """Raise OptionError if a value is not a share, above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise OptionError(f"{name}={value!r} is not a share. Pass a number above 0 and at most 1.")


def with_strongest_edges(graph: Graph, keep: float = 0.98) -> Graph:
    """Return a graph with only the edges of largest influence, and recompute its scores.

    Args:
        graph: the graph.
        keep: the share of the edges' influence that remains; other edges become 0. Default: 0.98.
    """
    edges, counted = graph.edges, _has_influence(graph.nodes)
    weights, through = influences(edges, counted)
    through[-1] += 1  # all influence begins at the target, the last node
    by_edge = weights * through[:, None]
    stays = _largest_values(by_edge.flatten(), keep).view_as(edges)
    stays |= ~counted  # edges from constants have no influence and are kept
    edges = torch.where(stays.to(edges.device), edges, torch.zeros_like(edges))
    errors, tokens = (_of_kind(graph.nodes, kind) for kind in ("error", "token"))
    new_scores = scores(edges, counted, errors, tokens)
    return replace(graph, edges=edges, scores={**graph.scores, **new_scores})


def strongest(nodes: Sequence[Node], keep: float) -> tuple[Tensor, float]:
    """Return the indices of the nodes that pruning keeps (k,), and their share of the influence.

    Args:
        nodes: the nodes of the graph.
        keep: the share of the influence of features and errors that is kept.
    """
    inner = torch.tensor([node.depth > 0 and node.kind in _INNER for node in nodes])
    strength = torch.tensor([node.influence for node in nodes], dtype=torch.double) * inner
    stays = ~inner | _largest_values(strength, keep)
    kept_share = float((strength * stays).sum() / strength.sum().clamp_min(1e-30))  # no 0 / 0
    return stays.nonzero()[:, 0], kept_share


def _has_influence(nodes: Sequence[Node]) -> Tensor:
    """Return a mask (n,) of the nodes with influence, which are all nodes except constants."""
    return torch.tensor([node.kind != "constants" for node in nodes])


def _of_kind(nodes: Sequence[Node], kind: Kind) -> Tensor:
    """Return a mask (n,) of the nodes of one kind."""
    return torch.tensor([node.kind == kind for node in nodes])


def _largest_values(values: Tensor, share: float) -> Tensor:
    """Return a mask (n,) of the largest values whose sum reaches a share of the total."""
    order = values.argsort(descending=True)
    so_far = values[order].cumsum(0)
    # a value is kept if the sum before it is below the share, apart from rounding error
    inside = (so_far - values[order]) < share * so_far[-1] * (1 - 1e-12)
    return torch.zeros_like(values, dtype=torch.bool).scatter(0, order, inside)
