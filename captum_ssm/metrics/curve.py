"""A measurement taken at several shares of a change, and the area under it.

The order in which units change by relevance, and the units changed at each share.

Shapes: B examples, N units (pixels, tokens) of each, F shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import as_mask, masked_scores

#: 10 % to 90 %, the shares of HA table 1.
TENTHS = tuple(i / 10 for i in range(1, 10))

#: 0 % to 100 %.
WHOLE = tuple(i / 10 for i in range(11))


@dataclass(frozen=True, eq=False)
class Curve:
    """One measurement per example and share.

    Attributes:
        fractions: the shares, rising, (F,).
        values: the measurements, (B, F), float64.

    Raises:
        InputError: when values does not have one column for each share.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Curve
        >>> curve = Curve(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[1.0, 1.0, 0.0]]))
        >>> curve.area().tolist()
        [0.75]
    """

    fractions: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.values.shape[1:] != self.fractions.shape:
            raise InputError(
                f"values has shape {tuple(self.values.shape)}, fractions "
                f"{tuple(self.fractions.shape)}: one column for each fraction is needed."
            )

    def mean(self) -> Tensor:
        """Return the mean curve over examples, (F,)."""
        return self.values.mean(0)

    def area(self, *, normalized: bool = True) -> Tensor:
        """Return the area under each example's curve by the trapezoid rule, (B,).

        Args:
            normalized: divide by the width: a constant curve's area is then its height. Without it,
                nine shares from 10 % to 90 % give at most 0.8. Default: True.

        Returns:
            The areas (B,); the mean of the areas is the score of all examples.

        Raises:
            OptionError: when the curve has only one share.
        """
        if len(self.fractions) < 2:
            raise OptionError(
                f"fractions={self.fractions.tolist()}: one point has no area. Use two or more."
            )
        at = self.fractions.to(self.values)
        area = torch.trapezoid(self.values, at, dim=-1)
        return area / (at[-1] - at[0]) if normalized else area


def change_order(
    relevance: Tensor,
    *,
    most_first: bool,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the place of each unit in the order of changes, from 0, (B, N).

    Args:
        relevance: (B, N).
        most_first: the most relevant units first, or the least relevant.
        mask: units that may be changed, (B, N); all other units come last. Default: None, all.
        generator: breaks ties at random, on the CPU; constant relevance is then a random order.
            Default: None, the unit further left comes first.

    Returns:
        (B, N) of integers, each of 0 to N - 1 once in a row.

    Raises:
        InputError: when relevance is not (B, N), or mask is not of its shape.
        NonFiniteError: when a unit that may be changed has relevance NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import change_order
        >>> change_order(torch.tensor([[0.1, 0.9, 0.5]]), most_first=True).tolist()
        [[2, 0, 1]]
    """
    scores, allowed = masked_scores(relevance, mask, "relevance", dims=2)
    key = (-scores if most_first else scores).masked_fill(~allowed, float("inf"))
    if generator is None:
        order = key.argsort(dim=-1, stable=True)
    else:
        shuffled = torch.rand(key.shape, generator=generator).argsort(-1).to(key.device)
        order = shuffled.gather(-1, key.gather(-1, shuffled).argsort(dim=-1, stable=True))
    places = torch.arange(key.shape[-1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def changed(order: Tensor, fractions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return True for the units that change at each share, (B, F, N).

    Of n units that may be changed, the share f changes the first floor(f n).

    Args:
        order: of :func:`change_order` with the same mask, (B, N).
        fractions: (F,).
        mask: units that may be changed, (B, N). Default: None, all.
    """
    units = as_mask(mask, order).sum(-1)
    # 0.7 * 10 is a little below 7 in some binary arithmetic
    counts = (fractions.to(units.device) * units[:, None] + 1e-9).floor()  # (B, F)
    return order[:, None] < counts[..., None]
