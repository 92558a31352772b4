"""Influence: the share of a target that passes through each node of a graph.

The absolute values of each node's incoming edges are divided by their sum. The influence of a node
is the sum over all paths from it to the target of the products of these shares (Ameisen et al.,
Circuit Tracing, 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor


def influences(
    edges: Tensor, counted: Tensor, entered: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each source's share of a node's input (m, n), and the influence of each node (n,).

    Args:
        edges: contributions of all nodes (columns) to m of the nodes (rows), (m, n). The last row
            belongs to the last node. The graph must have no cycles.
        counted: True for the nodes that have influence (n,).
        entered: the node of each row (m,); other nodes have no incoming edges. Default: None, all.

    Example:
        >>> import torch
        >>> from captum_ssm.inside.influence import influences
        >>> edges = torch.tensor([[0.0, 0, 0], [2, 0, 0], [1, -3, 0]])
        >>> influences(edges, torch.ones(3, dtype=torch.bool))[1].tolist()
        [1.0, 0.75, 0.0]
    """
    weights = edges.detach().cpu().double().abs() * counted
    total = weights.sum(1, keepdim=True)
    weights = torch.where(total > 0, weights / total.clamp_min(1e-300), weights)
    row = weights[-1]  # the influence over paths of one edge, then of two, and so on
    influence = torch.zeros_like(row)
    for _ in range(len(weights)):  # at most as long as the longest path
        if not bool(row.any()):
            break
        influence = influence + row
        row = (row if entered is None else row[entered]) @ weights
    return weights, influence


def scores(
    edges: Tensor, counted: Tensor, errors: Tensor, tokens: Tensor, entered: Tensor | None = None
) -> dict[str, float]:
    """Measure how much of a graph comes from features and tokens, and not from errors.

    Args:
        edges, counted, entered: as in :func:`influences`.
        errors: True for the nodes that are errors (n,).
        tokens: True for the nodes that are tokens (n,).

    Returns:
        ``completeness``, the share of nodes' inputs, weighted by influence, that is not of errors;
        ``replacement``, the tokens' share of the influence of tokens and errors.
    """
    weights, influence = influences(edges, counted, entered)
    weight = influence.clone() if entered is None else influence[entered]
    weight[-1] += 1.0  # the target
    weight = weight * (weights.sum(1) > 0)
    explained = 1 - weights[:, errors].sum(1)  # the share of each node's input
    ended_influence = influence[tokens].sum() + influence[errors].sum()
    return {
        "completeness": float((explained * weight).sum() / weight.sum().clamp_min(1e-300)),
        "replacement": float(influence[tokens].sum() / ended_influence.clamp_min(1e-300)),
    }
