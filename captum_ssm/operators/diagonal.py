"""Scaling of single tokens: gates, frozen activations and norms, skips, padding masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .base import Operator, Role, Shape
from .kernels.arithmetic import with_graphs
from .kernels.bands import Band
from .kernels.portions import some_heads
from .kernels.rows import Positions, Strip, at_positions, clipped

#: Role of a diagonal's factors, by component; factors of all other components have no role.
_ROLES: dict[str | None, Role] = {"gate": "gate", "scan": "key"}


class Diagonal(Operator):
    """Scaling of single tokens, y[t] = weight[t] x[t]: gates, frozen activations, norms, skips.

    Args:
        weight: factors broadcastable to (B, L, H, P).
        shape: sizes of the values to map.
        component: name of the mixer's part that it represents. Default: None, a structural part
            such as a mask.
        data_dependent: whether the factors depend on the input. Default: None, True if ``weight``
            has a factor for each example or each token.
        at_rest: value of a gate at zero gate input, such as 0.5 for a sigmoid. Rules that divide
            relevance among a mixer's factors use it as the gate's reference. A scalar, or one value
            for each channel (1, 1, H, P). Default: 0.0, the value of SiLU at zero.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Diagonal, Shape
        >>> shape = Shape(batch=1, tokens=3, heads=1, per_head=1)
        >>> gate = Diagonal(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1), shape, "gate")
        >>> gate.dense().int()
        tensor([[[1, 0, 0],
                 [0, 2, 0],
                 [0, 0, 3]]], dtype=torch.int32)
    """

    mixes_tokens = False

    def __init__(
        self,
        weight: Tensor,
        shape: Shape,
        component: str | None = None,
        data_dependent: bool | None = None,
        at_rest: float | Tensor = 0.0,
    ) -> None:
        self.weight = weight.detach()
        self.roles = {"weight": _ROLES[component]} if component in _ROLES else {}
        self.live = with_graphs({"weight": weight} if self.roles else {})
        self.shape = shape
        self.component = component
        self.at_rest = at_rest.detach() if isinstance(at_rest, Tensor) else at_rest
        is_shared = weight.shape[0] == weight.shape[1] == 1  # by all examples and tokens
        self.data_dependent = not is_shared if data_dependent is None else data_dependent

    def apply(self, v: Tensor) -> Tensor:
        return self.weight * v

    def transpose(self, u: Tensor) -> Tensor:
        return self.weight * u

    def at(self, coefficients: Mapping[str, Tensor]) -> Diagonal:
        return self._with(coefficients["weight"])

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of_weight = (values * gradient).sum_to_size(self.weight.shape)
        return self.weight * gradient, {"weight": of_weight}

    def _mean_forward(self, x: Tensor) -> Tensor:
        return self.weight.mean((-1, -2)) * x

    def _mean_adjoint(self, r: Tensor) -> Tensor:
        return self.weight.mean((-1, -2)) * r

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def select(self, heads: Sequence[int]) -> Operator:
        # a weight of size 1 is shared by all heads
        weight = self.weight if self.weight.shape[2] == 1 else some_heads(self.weight, heads)
        selected = self._with(weight, heads=len(heads))
        if isinstance(selected.at_rest, Tensor):
            selected.at_rest = some_heads(selected.at_rest, heads)
        return selected

    def reordered(self, order: Tensor) -> Diagonal:
        """Return the diagonal whose token t has this diagonal's factor of token ``order[t]``."""
        if self.weight.shape[1] == 1:
            return self
        return self._with(self.weight.index_select(1, order))

    def inner_rows(self, positions: Positions, weight: Tensor | None) -> tuple[Positions, Tensor]:
        """Express rows of the product self . inner as weighted rows of the inner operator.

        Args:
            positions: positions of the product's rows.
            weight: factors of the product's rows, broadcastable to (Q, B, 1, H, P); None for 1.

        Returns:
            The positions and factors of the inner operator's rows.
        """
        own = at_positions(self.weight, positions)
        return positions, own if weight is None else own * weight

    def mean_of_channels(self) -> Diagonal:
        """Return the diagonal with each head's factors averaged over the head's value channels."""
        mean = self._with(self.weight.mean(-1, keepdim=True))
        if isinstance(mean.at_rest, Tensor):
            mean.at_rest = mean.at_rest.mean(-1, keepdim=True)
        return mean

    def _with(self, weight: Tensor, **sizes: int) -> Diagonal:
        """Return the same operator with new factors; ``sizes`` are the sizes that change."""
        shape = self.shape._replace(**sizes)
        return Diagonal(weight, shape, self.component, self.data_dependent, self.at_rest)

    def after_band(self, band: Band) -> Band | None:
        return {lag: self.weight * factor for lag, factor in band.items()}

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        batch, _, heads, _ = self.shape
        size = (batch, heads) if by_head else (batch,)
        empty = Strip(self._zeros(*size, len(rows), 0, factor=left), rows, range(0))
        return self.added_to(empty, left, band)

    def added_to(self, strip: Strip, left: Tensor, band: Band) -> Strip:
        """Add rows of diag(left) . self . band to a strip of these rows; may overwrite it."""
        tokens, rows = self.shape.tokens, strip.rows
        # columns i - lag of all rows i, from the largest lag to the smallest
        first, last = clipped(rows, -max(band), tokens), clipped(rows, -min(band), tokens)
        strip = strip.covering(rows, range(first.start, last.stop))
        weight = (left * self.weight).expand(self.shape)
        for lag, factor in band.items():
            # the factor of token i is at row i and column i - lag, if there is such a column
            inside = clipped(clipped(rows, -lag, tokens), lag, tokens)
            part = slice(inside.start, inside.stop)
            products = weight[:, part] * factor.expand(self.shape)[:, part]  # (B, R, H, P)
            # a strip with four dimensions has one matrix per head
            sums = products.sum(-1).mT if strip.entries.dim() == 4 else products.sum((-1, -2))
            top, side = inside.start - rows.start, inside.start - lag - strip.columns.start
            into = strip.entries[..., top : top + len(inside), side : side + len(inside)]
            into.diagonal(0, -2, -1).add_(sums)
        return strip
