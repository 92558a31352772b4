"""A measurement taken at several shares of a change, and the area under it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError, OptionError

#: 10 % to 90 %, the shares of HA table 1.
TENTHS = tuple(i / 10 for i in range(1, 10))

#: 0 % to 100 %.
WHOLE = tuple(i / 10 for i in range(11))


@dataclass(frozen=True, eq=False)
class Curve:
    """One measurement per example and share.

    Attributes:
        fractions: the shares, rising, (F,).
        values: what was measured, (B, F), float64.

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
        """The mean curve over examples, (F,)."""
        return self.values.mean(0)

    def area(self, *, normalized: bool = True) -> Tensor:
        """The area under each example's curve by the trapezoid rule, (B,).

        Args:
            normalized: divide by the width, so that a constant curve's area is its height; without
                it, nine shares from 10 % to 90 % give at most 0.8. Default: True.

        Returns:
            (B,); its mean is the score of all examples.

        Raises:
            OptionError: when there is one share alone.
        """
        if len(self.fractions) < 2:
            raise OptionError(
                f"fractions={self.fractions.tolist()}: one point has no area. Use two or more."
            )
        at = self.fractions.to(self.values)
        area = torch.trapezoid(self.values, at, dim=-1)
        return area / (at[-1] - at[0]) if normalized else area
