"""Numbers gathered over batches of examples: their mean or a ratio of sums, with an interval.

Every metric of this package returns numbers per example. A :class:`Sample` keeps the
numbers: batches can be added one by one, results of two processes merged, and confidence intervals
drawn by resampling examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import check_positive

#: (..., k) sums over examples, and (..., k) how many examples each is the sum of: (..., m)
Statistic = Callable[[Tensor, Tensor], Tensor]

#: Elements of one block of resampling weights (64 MiB).
_BLOCK_ELEMENTS = 2**23


def mean(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of each column; NaN if no example has a number."""
    return sums / counts


class Interval(NamedTuple):
    """A statistic with the bounds of its confidence interval, each (m,).

    Attributes:
        low: the lower bound.
        value: the statistic of the examples themselves.
        high: the upper bound.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Sample
        >>> sample = Sample()
        >>> sample.update(torch.tensor([0.0, 1.0, 1.0, 1.0]))
        >>> [bound.item() for bound in sample.interval()]
        [0.25, 0.75, 1.0]
    """

    low: Tensor
    value: Tensor
    high: Tensor


class Sample:
    """The contributions of many examples to a statistic.

    Args:
        statistic: a function of the columns' sums and numbers of defined examples. Default:
            :func:`mean`.

    Raises:
        InputError: when a batch is not (B,) or (B, k), has other columns than before or holds
            infinity; when a sample of another statistic is merged; or before the first example.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Sample
        >>> sample = Sample()
        >>> sample.update(torch.tensor([0.0, 1.0]))
        >>> sample.update(torch.tensor([1.0, float("nan")]))
        >>> round(float(sample.value()), 4), len(sample), int(sample.undefined())
        (0.6667, 4, 1)
    """

    def __init__(self, statistic: Statistic = mean) -> None:
        self.statistic = statistic
        self._batches: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of examples."""
        return sum(map(len, self._batches))

    @property
    def rows(self) -> Tensor:
        """The numbers of all examples, (n, k), float64 on the CPU."""
        if not self._batches:
            raise InputError("The sample is empty: call update() with a batch of numbers first.")
        if len(self._batches) > 1:
            self._batches = [torch.cat(self._batches)]
        return self._batches[0]

    def update(self, values: Tensor) -> None:
        """Add a batch of examples.

        Args:
            values: (B,), or (B, k) where each example has several numbers, such as the points of a
                curve. NaN marks an example without such a number.
        """
        if not isinstance(values, Tensor) or values.dim() not in (1, 2):
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(f"values must be a tensor (B,) or (B, k), got {found}.")
        rows = values.detach().cpu().double()
        rows = rows[:, None] if rows.dim() == 1 else rows
        if self._batches and rows.shape[1] != self._batches[0].shape[1]:
            raise InputError(
                f"values has {rows.shape[1]} numbers per example, those before had "
                f"{self._batches[0].shape[1]}. Use one sample for each kind of number."
            )
        if bool(rows.isinf().any()):
            raise InputError("values holds infinity, which leaves no mean. Pass NaN for 'none'.")
        self._batches.append(rows.clone())

    def merge(self, other: Sample) -> None:
        """Add the examples of another sample of the same statistic."""
        if other.statistic is not self.statistic:
            raise InputError("other gathers another statistic, so the two cannot be merged.")
        for batch in list(other._batches):
            self.update(batch)

    def undefined(self) -> Tensor:
        """Return the number of examples without a number, by column (k,)."""
        return self.rows.isnan().sum(0)

    def value(self) -> Tensor:
        """Return the statistic of all examples, (m,)."""
        rows = self.rows
        return self.statistic(rows.nansum(0), (~rows.isnan()).sum(0).double())

    def interval(
        self, confidence: float = 0.95, *, resamples: int = 1000, seed: int = 0
    ) -> Interval:
        """Return a percentile bootstrap interval: examples are drawn anew, with replacement.

        Args:
            confidence: share of resamples within the bounds. Default: 0.95.
            resamples: number of resamples of all examples. Default: 1000.
            seed: of the draws; the same seed and examples give the same bounds. Default: 0.

        Returns:
            The bounds around :meth:`value`; resamples in which the statistic is undefined do not
            count, and with none left the bounds are NaN.

        Raises:
            OptionError: when confidence is not between 0 and 1, or resamples is below 1.
        """
        if not 0 < confidence < 1:
            raise OptionError(f"confidence={confidence}: use a number between 0 and 1.")
        check_positive(resamples, "resamples")
        drawn = self._resampled(resamples, torch.Generator().manual_seed(seed))
        tail = (1 - confidence) / 2
        low, high = drawn.nanquantile(torch.tensor([tail, 1 - tail], dtype=drawn.dtype), dim=0)
        return Interval(low, self.value(), high)

    def _resampled(self, resamples: int, generator: torch.Generator) -> Tensor:
        """Return the statistic of each resample, (resamples, m)."""
        rows = self.rows
        known, rows = (~rows.isnan()).double(), rows.nan_to_num()
        count = len(rows)
        step = max(1, _BLOCK_ELEMENTS // count)
        parts = []
        for start in range(0, resamples, step):
            size = min(step, resamples - start)
            chosen = torch.randint(count, (size, count), generator=generator)
            times = torch.zeros(size, count, dtype=torch.float64)
            times.scatter_add_(1, chosen, torch.ones_like(times))
            parts.append(self.statistic(times @ rows, times @ known))
        return torch.cat(parts)
