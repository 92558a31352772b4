"""Curves of measurements at several shares of changed units, and the areas under them.

Units, such as pixels or tokens, are changed in the order of their relevance.

Shapes: B examples, N units per example, F shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import as_mask, masked_scores

#: The shares 10 %, 20 %, ..., 90 %, as in HA table 1.
TENTHS = tuple(i / 10 for i in range(1, 10))

#: The shares 0 %, 10 %, ..., 100 %.
WHOLE = tuple(i / 10 for i in range(11))


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve for each example: measurements at several shares of changed units.

    Attributes:
        fractions: the shares in increasing order, (F,).
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
                f"values has shape {tuple(self.values.shape)}, but fractions has "
                f"{tuple(self.fractions.shape)}. Pass values with one column for each fraction."
            )

    def mean(self) -> Tensor:
        """Return the mean curve over examples, (F,)."""
        return self.values.mean(0)

    def area(self, *, normalized: bool = True) -> Tensor:
        """Return the area under each example's curve with the trapezoid rule.

        Args:
            normalized: divide by the distance between the first and last share, so that the area
                under a constant curve is its value. With False, the area under a curve from 10 % to
                90 % is at most 0.8 times its maximum. Default: True.

        Returns:
            The areas (B,); their mean is the score of all examples.

        Raises:
            OptionError: when the curve has only one share.
        """
        if len(self.fractions) < 2:
            raise OptionError(
                f"fractions={self.fractions.tolist()} has one point. Pass two or more for an area."
            )
        shares = self.fractions.to(self.values)
        area = torch.trapezoid(self.values, shares, dim=-1)
        return area / (shares[-1] - shares[0]) if normalized else area


def change_order(
    relevance: Tensor,
    *,
    most_first: bool,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the rank of each unit in the order of changes.

    Args:
        relevance: the relevance of each unit, (B, N).
        most_first: True to start with the most relevant unit, False with the least relevant unit.
        mask: True for units that may be changed (B, N); other units come last. Default: None, all.
        generator: a CPU generator for a random order of units with equal relevance. Default: None,
            units with equal relevance keep their order.

    Returns:
        Integers (B, N); each row is a permutation of 0 to N - 1.

    Raises:
        InputError: when relevance is not (B, N), or the shapes of mask and relevance differ.
        NonFiniteError: when the relevance of a unit that may be changed is NaN or infinite.

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
        # a stable sort of shuffled units: units with equal relevance keep their random order
        shuffled = torch.rand(key.shape, generator=generator).argsort(-1).to(key.device)
        order = shuffled.gather(-1, key.gather(-1, shuffled).argsort(dim=-1, stable=True))
    # the inverse permutation: from the unit at each rank to the rank of each unit
    ranks = torch.arange(key.shape[-1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)


def changed_at_shares(order: Tensor, fractions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return a mask (B, F, N) of the units that are changed at each share.

    If n units of an example may be changed, the first floor(f n) of them are changed at share f.

    Args:
        order: the result of :func:`change_order` with the same mask, (B, N).
        fractions: the shares, (F,).
        mask: True for units that may be changed, (B, N). Default: None, all.
    """
    units = as_mask(mask, order).sum(-1)
    # add a little, because 0.7 * 10 may be rounded to a number below 7
    counts = (fractions.to(units.device) * units[:, None] + 1e-9).floor()  # (B, F)
    return order[:, None] < counts[..., None]
