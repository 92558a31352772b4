"""The graph of an output's exact parts: tokens, features, and their direct contributions."""

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
            ``"whole"`` activation, ``"error"`` left by a place's features, ``"constants"`` or
            ``"target"``.
        layer: the place; empty for tokens, constants and the target.
        depth: 0 for tokens, then the number of the place in the order of the run, and one more for
            the target.
        position: its token; None for constants, and a target without a token.
        index: the number of the feature, head, class, or token in the vocabulary. Default: None.
        activation: a feature's value, a whole activation's contribution to the target, or an
            error's norm.
        influence: the share of the target that passes through it, 0 to 1.
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
        nodes: tokens, features, errors, constants, and last the target; n of them.
        edges: ``edges[t, s]`` is the contribution of node s to node t past all others, (n, n). The
            row of a node sums to its activation, unless the graph was pruned.
        tokens: a text for each position.
        scores: ``kept``, the share of influence that pruning kept. ``completeness``, the share of
            the nodes' inputs, weighted by influence, that does not come from errors.
            ``replacement``, the tokens' share of the influence of tokens and errors.
        writes: the part of the activation at its place that each node adds; None for tokens,
            constants and the target.

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
        """Return one entry for each node."""
        return [asdict(node) for node in self.nodes]

    def effects(self) -> Tensor:
        """Return each node's contribution to the target over all paths left in the graph, (n,)."""
        sizes = torch.tensor([node.activation for node in self.nodes], dtype=torch.double)
        inner = torch.tensor([node.kind in _ENTERED for node in self.nodes]) & (sizes != 0)
        edges = self.edges.cpu().double()
        shares = torch.where(inner, 1 / sizes, torch.zeros_like(sizes))[:, None] * edges
        row = edges[-1]
        total = torch.zeros_like(row)
        for _ in self.nodes:  # at most as long as the longest path
            if not bool(row.any()):
                break
            total, row = total + row, row @ shares
        return total

    def to_json(self, path: str | Path) -> None:
        """Write it to a .json file for circuit-tracer's viewer; see :func:`.inside.to_json`."""
        to_json(self, path)

    def to_graphml(self, path: str | Path) -> None:
        """Write it to a file as GraphML; see :func:`.inside.to_graphml`."""
        to_graphml(self, path)

    def pruned(self, keep: float = 0.8, keep_edges: float = 0.98) -> Graph:
        """Keep only the nodes and edges of the greatest influence.

        Args:
            keep: the share of the influence of features and errors that is kept. Tokens, constants
                and the target stay. Default: 0.8.
            keep_edges: the share of the edges' influence that is kept; other edges become 0.
                Default: 0.98.
        """
        check_share("keep", keep)
        check_share("keep_edges", keep_edges)
        which, kept = strongest(self.nodes, keep)
        edges = self.edges[which][:, which]
        nodes = tuple(self.nodes[i] for i in which.tolist())
        writes = tuple(self.writes[i] for i in which.tolist()) if self.writes else ()
        fewer = Graph(nodes, edges, self.tokens, {"kept": kept}, writes)
        return with_strongest_edges(fewer, keep_edges)

    def path(self, start: int | None = None) -> list[Node]:
        """Return the path that carries most from the tokens to the target, token first.

        A path carries the product of its edges' shares in all that enters each node.

        Args:
            start: the position of the token that it begins with. Default: None, any.
        """
        if start is not None and not -len(self.tokens) <= start < len(self.tokens):
            raise OptionError(f"start={start} is none of the {len(self.tokens)} tokens.")
        weights, _ = influences(self.edges, _has_influence(self.nodes))
        order = sorted(range(len(self.nodes)), key=lambda i: -self.nodes[i].depth)
        best = torch.zeros(len(self.nodes), dtype=torch.double)
        following = [-1] * len(self.nodes)
        best[-1] = 1.0
        for node in order:
            if best[node] == 0:
                continue
            for source in (weights[node] > 0).nonzero()[:, 0].tolist():
                reached = float(best[node] * weights[node, source])
                if reached > best[source]:
                    best[source], following[source] = reached, node
        tokens = _tokens(self.nodes).double() * best
        if start is not None:
            at = [node.position == start % len(self.tokens) for node in self.nodes]
            tokens = tokens * torch.tensor(at)
        if not bool(tokens.any()):
            return [self.nodes[-1]]
        found = [int(tokens.argmax())]
        while following[found[-1]] >= 0:
            found.append(following[found[-1]])
        return [self.nodes[i] for i in found]


#: Kinds of nodes that something enters, the target aside.
_ENTERED = ("feature", "direction", "whole")
#: Kinds of nodes that may be pruned.
_INNER = (*_ENTERED, "error")


def check_share(name: str, value: Any) -> None:
    """Raise if a value is not a share, above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise OptionError(f"{name}={value!r} must be a share: above 0, at most 1.")


def with_strongest_edges(graph: Graph, keep: float = 0.98) -> Graph:
    """Keep only the edges of the greatest influence, and compute the scores anew.

    Args:
        graph: the graph.
        keep: the share of the edges' influence that is kept; others become 0. Default: 0.98.
    """
    edges, counted = graph.edges, _has_influence(graph.nodes)
    weights, through = influences(edges, counted)
    by_edge = weights * (through + _at_target(through))[:, None]
    stays = _greatest(by_edge.flatten(), keep).view_as(edges)
    stays |= ~counted  # constants are no influence, and stay
    edges = torch.where(stays.to(edges.device), edges, torch.zeros_like(edges))
    found = scores(edges, counted, _errors(graph.nodes), _tokens(graph.nodes))
    return replace(graph, edges=edges, scores={**graph.scores, **found})


def strongest(nodes: Sequence[Node], keep: float) -> tuple[Tensor, float]:
    """Return the numbers of the nodes that pruning keeps (k,), and their share of the influence.

    Args:
        nodes: of the graph.
        keep: the share of the influence of features and errors that is kept.
    """
    inner = torch.tensor([node.depth > 0 and node.kind in _INNER for node in nodes])
    strength = torch.tensor([node.influence for node in nodes], dtype=torch.double) * inner
    stays = ~inner | _greatest(strength, keep)
    kept = float((strength * stays).sum() / strength.sum().clamp_min(1e-30))
    return stays.nonzero()[:, 0], kept


def _has_influence(nodes: Sequence[Node]) -> Tensor:
    """Return True for the nodes that have influence, all but constants, (n,)."""
    return torch.tensor([node.kind != "constants" for node in nodes])


def _errors(nodes: Sequence[Node]) -> Tensor:
    return torch.tensor([node.kind == "error" for node in nodes])


def _tokens(nodes: Sequence[Node]) -> Tensor:
    return torch.tensor([node.kind == "token" for node in nodes])


def _at_target(through: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(through[:-1]), torch.ones_like(through[-1:])])


def _greatest(values: Tensor, share: float) -> Tensor:
    """Return True for the fewest values (n,) that make up a share of their sum."""
    order = values.argsort(descending=True)
    so_far = values[order].cumsum(0)
    # one that begins below the share is in; the last digits of a sum do not decide
    inside = (so_far - values[order]) < share * so_far[-1] * (1 - 1e-12)
    return torch.zeros_like(values, dtype=torch.bool).scatter(0, order, inside)
