"""How much of a target runs through each node of a graph, as the field counts it.

Each node's incoming edges are taken by their absolute values, as shares of their sum.  The
influence of a node is the sum over all paths from it to the target of the products of the shares
(Ameisen et al., Circuit Tracing, 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor


def influences(edges: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of what enters each node (n, n), and the influence of each on the last one (n,).

    Args:
        edges: what each node adds to each, (n, n), targets in rows; without cycles.
        told: which nodes have influence (n,).

    Example:
        >>> import torch
        >>> from captum_ssm.inside.influence import influences
        >>> edges = torch.tensor([[0.0, 0, 0], [2, 0, 0], [1, -3, 0]])
        >>> influences(edges, torch.ones(3, dtype=torch.bool))[1].tolist()
        [1.0, 0.75, 0.0]
    """
    weights = edges.detach().cpu().double().abs() * told
    total = weights.sum(1, keepdim=True)
    weights = torch.where(total > 0, weights / total.clamp_min(1e-300), weights)
    row = weights[-1]
    through = torch.zeros_like(row)
    for _ in range(len(weights)):  # at most as long as the longest path
        if not bool(row.any()):
            break
        through = through + row
        row = row @ weights
    return weights, through


def scores(edges: Tensor, told: Tensor, errors: Tensor, tokens: Tensor) -> dict[str, float]:
    """How much of a graph is told apart, not an error.

    Args:
        edges, told: as for :func:`influences`.
        errors: which nodes are errors (n,).
        tokens: which are tokens (n,).

    Returns:
        ``completeness`` and ``replacement``, both 0 to 1.
    """
    weights, through = influences(edges, told)
    reached = through.clone()
    reached[-1] += 1.0
    reached = reached * (weights.sum(1) > 0)
    known = 1 - weights[:, errors].sum(1)
    ended = through[tokens].sum() + through[errors].sum()
    return {
        "completeness": float((known * reached).sum() / reached.sum().clamp_min(1e-300)),
        "replacement": float(through[tokens].sum() / ended.clamp_min(1e-300)),
    }
