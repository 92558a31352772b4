"""Affine steps from a mixer's output to the residual stream: norms, gates and projections.

Each step acts on every token separately. It is affine because factors such as a norm's statistics
are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..operators.kernels.rows import tokens_at


class AffineStep(NamedTuple):
    """The map y = (x * factor) matrix + bias of each token's features.

    Attributes:
        factor: a scalar, or a tensor that broadcasts to x (B, L, E). Default: 1.0.
        matrix: a matrix (E, E'). Default: None, the identity.
        bias: a vector (E'). Default: None, no bias.
    """

    factor: float | Tensor = 1.0
    matrix: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the step to ``x`` (B, L, E)."""
        out = x * _factor_like(self.factor, x)
        if self.matrix is not None:
            out = out @ self.matrix.to(out)
        return out if self.bias is None else out + self.bias.to(out)

    @property
    def is_of_tokens(self) -> bool:
        """Return True if the factor is one scalar for each token (B, L, 1)."""
        factor = self.factor
        if not isinstance(factor, Tensor) or factor.dim() != 3:
            return False
        return factor.shape[1] > 1 and factor.shape[2] == 1

    @property
    def is_alike(self) -> bool:
        """Return True if the step is the same at every token of every example."""
        return not isinstance(self.factor, Tensor) or self.factor.numel() == self.factor.shape[-1]

    def back(self, direction: Tensor) -> Tensor:
        """Apply the adjoint of the step, without its bias, to ``direction`` (..., B, L, E')."""
        if self.matrix is not None:
            direction = direction @ self.matrix.to(direction).T
        return direction * _factor_like(self.factor, direction)

    def at(self, index: Tensor) -> AffineStep:
        """Return the step at tokens ``index`` (B, q), to be applied to vectors (B, q, s, E)."""
        factor = self.factor
        if not isinstance(factor, Tensor) or factor.dim() < 3:
            return self
        if factor.shape[1] > 1:
            factor = tokens_at(factor, index)
        return self._replace(factor=factor[:, :, None])  # (B, q, 1, E)


#: The steps from a mixer's output to the summand that is added to the residual stream.
Way = Sequence[AffineStep]


def along(way: Way, x: Tensor) -> Tensor:
    """Apply the steps to the residual stream, one after the other, to ``x`` (B, L, E)."""
    for step in way:
        x = step(x)
    return x


def _factor_like(factor: float | Tensor, x: Tensor) -> float | Tensor:
    return factor.to(x) if isinstance(factor, Tensor) else factor
