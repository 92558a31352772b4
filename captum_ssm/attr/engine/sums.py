"""Convergence checks: the value that relevance should sum to, the sum, and the difference."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from captum.attr import Attribution
from torch import Tensor

from .method import SSMAttribution
from .result import part

#: Largest accepted difference, relative to the larger of the two values.
_SHARE = 0.05


class CheckedSum(NamedTuple):
    """The sum of one example's relevance, and its expected value.

    Attributes:
        of: a phrase for the expected value, such as ``"the output"``.
        wanted: the expected value.
        total: the sum of the relevance.
    """

    of: str
    wanted: float
    total: float

    @property
    def delta(self) -> float:
        """The sum minus its expected value."""
        return self.total - self.wanted

    @property
    def adds_up(self) -> bool:
        """Return True if the difference is at most a twentieth of the larger value."""
        return abs(self.delta) <= _SHARE * max(abs(self.wanted), abs(self.total))

    @property
    def told(self) -> str:
        """The sum, its expected value and the difference in one sentence.

        Example:
            >>> from captum_ssm.attr.engine.sums import CheckedSum
            >>> CheckedSum("the output", 2.92, -111.0).told
            'Does not add up: sum -111; should be 2.92, the output; delta -1.1e+02.'
        """
        mark = "Sum" if self.adds_up else "Does not add up: sum"
        wanted = f"should be {self.wanted:.3g}, {self.of}"
        return f"{mark} {self.total:.3g}; {wanted}; delta {self.delta:.2g}."

    @property
    def facts(self) -> dict[str, Any]:
        """All attributes and properties by name, for pages and files."""
        return self._asdict() | {"delta": self.delta, "adds_up": self.adds_up, "told": self.told}


@part
@dataclass(frozen=True, eq=False)
class Sums:
    """The sums of relevance of all examples of a batch, and their expected values.

    Attributes:
        of: a phrase for the expected values, such as ``"the output"``.
        wanted: the expected values (B,).
        total: the sums of relevance (B,).
    """

    of: str
    wanted: Tensor
    total: Tensor

    def __getitem__(self, example: int) -> CheckedSum:
        """Return the sum of one example."""
        return CheckedSum(self.of, float(self.wanted[example]), float(self.total[example]))


def attribute_with_sums(
    method: Attribution, inputs: Any, /, **options: Any
) -> tuple[Any, Sums | None]:
    """Call ``method.attribute``; return relevance and its sums, None if it has no exact sum."""
    option = "return_convergence_delta"
    parameters = inspect.signature(method.attribute).parameters
    if option not in parameters or option in options or not method.has_convergence_delta():
        return method.attribute(inputs, **options), None
    relevance, delta = method.attribute(inputs, **options, return_convergence_delta=True)
    parts: Sequence[Tensor] = relevance if isinstance(relevance, tuple) else (relevance,)
    # relevance that is interpolated over pixels does not sum to the output
    is_spread = parts[0].dim() == 4 and not getattr(method, "sums_pixels", True)
    # a delta per step or sample, as some methods of Captum return, does not fit the examples
    if is_spread or delta.shape != parts[0].shape[:1]:
        return relevance, None
    # on the CPU: Apple's MPS has no float64
    total = torch.stack([x.detach().cpu().double().flatten(1).sum(1) for x in parts]).sum(0)
    delta = delta.detach().cpu().to(total)
    if isinstance(method, SSMAttribution):  # delta is wanted - total here, the negative in Captum
        return relevance, Sums("the output without constants", total + delta, total)
    return relevance, Sums("the output minus the output for the baseline", total - delta, total)


def joined(parts: Sequence[Sums]) -> Sums:
    """Concatenate the sums of several parts of a batch."""
    wanted, total = (torch.cat([getattr(x, name) for x in parts]) for name in ("wanted", "total"))
    return Sums(parts[0].of, wanted, total)
