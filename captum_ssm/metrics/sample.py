"""Collect values of examples, and compute a statistic with a bootstrap confidence interval.

Every metric of this package returns values per example. A :class:`Sample` stores these values
from several batches or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import check_positive

#: A function from sums over examples (..., k) and counts of examples (..., k) to (..., m).
Statistic = Callable[[Tensor, Tensor], Tensor]

#: The largest number of resampling weights that are in memory at a time (64 MiB).
_BLOCK_ELEMENTS = 2**23


def mean(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of each column; NaN if no example has a value."""
    return sums / counts


class Interval(NamedTuple):
    """A statistic with the bounds of its confidence interval, each (m,).

    Attributes:
        low: the lower bound of the interval.
        value: the statistic of all examples.
        high: the upper bound of the interval.

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
    """Collect values of many examples, and compute a statistic such as the mean.

    Args:
        statistic: a function of each column's sum over examples and number of examples that are not
            NaN. Default: :func:`mean`.

    Raises:
        InputError: when a batch is not (B,) or (B, k), has a different number of columns than
            earlier batches or contains infinity; when the statistic of a merged sample differs; or
            when results are read before the first example.

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
        """The values of all examples, (n, k), float64 on the CPU."""
        if not self._batches:
            raise InputError("The sample is empty. Call update() with a batch of numbers first.")
        if len(self._batches) > 1:
            self._batches = [torch.cat(self._batches)]
        return self._batches[0]

    def update(self, values: Tensor) -> None:
        """Add a batch of examples.

        Args:
            values: one value per example (B,), or several values per example (B, k), such as the
                points of a curve. NaN marks a value that is not defined.
        """
        if not isinstance(values, Tensor) or values.dim() not in (1, 2):
            actual = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(f"values is {actual}. Pass a tensor (B,) or (B, k).")
        rows = values.detach().cpu().double()
        rows = rows[:, None] if rows.dim() == 1 else rows
        if self._batches and rows.shape[1] != self._batches[0].shape[1]:
            raise InputError(
                f"values has {rows.shape[1]} numbers per example, but earlier batches have "
                f"{self._batches[0].shape[1]}. Use a separate Sample for each kind of number."
            )
        if bool(rows.isinf().any()):
            raise InputError(
                f"values has infinity in {int(rows.isinf().sum())} of {rows.numel()} entries, so "
                "no mean exists. Pass NaN for undefined numbers."
            )
        self._batches.append(rows.clone())

    def merge(self, other: Sample) -> None:
        """Add the examples of another sample with the same statistic."""
        if other.statistic is not self.statistic:
            raise InputError(
                f"other has the statistic {other.statistic!r}, not {self.statistic!r}. Merge only "
                "samples of the same statistic."
            )
        for batch in list(other._batches):
            self.update(batch)

    def undefined(self) -> Tensor:
        """Return for each column the number of examples that are NaN, (k,)."""
        return self.rows.isnan().sum(0)

    def value(self) -> Tensor:
        """Return the statistic of all examples, (m,)."""
        rows = self.rows
        return self.statistic(rows.nansum(0), (~rows.isnan()).sum(0).double())

    def interval(
        self, confidence: float = 0.95, *, resamples: int = 1000, seed: int = 0
    ) -> Interval:
        """Return a percentile bootstrap interval over examples, drawn with replacement.

        Args:
            confidence: the share of resamples within the bounds. Default: 0.95.
            resamples: the number of resamples. Default: 1000.
            seed: the seed of the random draws. Default: 0.

        Returns:
            The bounds and :meth:`value`. Resamples with an undefined statistic are ignored; if all
            are undefined, the bounds are NaN.

        Raises:
            OptionError: when confidence is not between 0 and 1, or resamples is below 1.
        """
        if not 0 < confidence < 1:
            raise OptionError(f"confidence={confidence}: pass a number between 0 and 1.")
        check_positive(resamples, "resamples")
        values = self._resampled_statistics(resamples, torch.Generator().manual_seed(seed))
        tail = (1 - confidence) / 2
        low, high = values.nanquantile(torch.tensor([tail, 1 - tail], dtype=values.dtype), dim=0)
        return Interval(low, self.value(), high)

    def _resampled_statistics(self, resamples: int, generator: torch.Generator) -> Tensor:
        """Return the statistic of each resample, (resamples, m)."""
        rows = self.rows
        is_defined, rows = (~rows.isnan()).double(), rows.nan_to_num()
        examples = len(rows)
        block = max(1, _BLOCK_ELEMENTS // examples)
        statistics = []
        for start in range(0, resamples, block):
            size = min(block, resamples - start)
            draws = torch.randint(examples, (size, examples), generator=generator)
            # how often each resample contains each example
            weights = torch.zeros(size, examples, dtype=torch.float64)
            weights.scatter_add_(1, draws, torch.ones_like(weights))
            statistics.append(self.statistic(weights @ rows, weights @ is_defined))
        return torch.cat(statistics)
