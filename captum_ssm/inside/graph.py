"""What a graph of an answer is: nodes, and what each of them adds to others directly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Node:
    """Something that took part in an answer.

    Attributes:
        kind: what it is.
        layer: name of the module; empty for tokens, constants and the target.
        depth: 0 for tokens, 1 and on for sites in the order in which they ran, last for the target.
        position: the token; None for constants.
        index: number of the feature; the vocabulary's id for tokens and targets.
        activation: its value: the pre-activation of a feature, the norm of an error, the logit.
        influence: share of the target's influence that runs through it, 0 to 1.
        label: what a reader sees.
    """

    kind: Literal["token", "feature", "direction", "error", "constants", "target"]
    layer: str
    depth: int
    position: int | None
    index: int | None
    activation: float
    influence: float
    label: str


@dataclass(frozen=True, eq=False)
class Graph:
    """Who added what to whom.

    Attributes:
        nodes: in order of depth.
        edges: (n, n); ``edges[t, s]`` is what s adds to t directly.
        tokens: one text per position.
        scores: ``"kept"``, ``"completeness"`` and ``"replacement"``.
    """

    nodes: tuple[Node, ...]
    edges: Tensor
    tokens: tuple[str, ...]
    scores: Mapping[str, float]
