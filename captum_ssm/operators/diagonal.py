"""Scaling of single tokens: gates, frozen activations and norms, skips, padding masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .band import Band
from .base import Operator, Shape


class Diagonal(Operator):
    """y[t] = weight[t] x[t].

    Args:
        weight: factors broadcastable to (B, L, H, P).
        shape: the sizes acted on.
        component: name of the part it stands for, or None.
    """

    def __init__(self, weight: Tensor, shape: Shape, component: str | None = None) -> None:
        self.weight = weight.detach()
        self.shape = shape
        self.component = component

    def apply(self, v: Tensor) -> Tensor:
        return self.weight * v

    def transpose(self, u: Tensor) -> Tensor:
        return self.weight * u

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def select(self, heads: Sequence[int]) -> Operator:
        weight = self.weight if self.weight.shape[2] == 1 else self.weight[:, :, list(heads)]
        return Diagonal(weight, self.shape._replace(heads=len(heads)), self.component)

    def after_band(self, band: Band) -> Band | None:
        return {lag: self.weight * factor for lag, factor in band.items()}

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.diag_embed((left * self.weight * right).expand(self.shape).sum((-1, -2)))
