"""Columns' statistics of sums over examples, and their intervals, drawn anew by the bootstrap.

Shapes: n examples of a model, k numbers of each, m values of the statistic, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.metrics.sample import Interval, Statistic

CONFIDENCE = 0.95
RESAMPLES = 1000


def ratio(sums: Tensor, _: Tensor) -> Tensor:
    """The first sum over the second, (..., 2) to (..., 1)."""
    return sums[..., :1] / sums[..., 1:]


def correlation(sums: Tensor, _: Tensor) -> Tensor:
    """Pearson's, of the sums of 1, x, y, x², y² and xy, (..., 6) to (..., 1)."""
    n, x, y, xx, yy, xy = sums.unbind(-1)
    spread = ((n * xx - x * x) * (n * yy - y * y)).clamp_min(0)
    return ((n * xy - x * y) / spread.sqrt())[..., None]


def interval(statistic: Statistic, models: Sequence[Tensor]) -> Interval:
    """A percentile bootstrap interval, the same one for the same numbers.

    With one model its examples are drawn anew, with replacement.  With several, models are drawn
    anew, and examples of each one drawn: training again changes results, too.

    Args:
        statistic: see :class:`~captum_ssm.metrics.Sample`.
        models: the numbers of each model's examples, (n, k) each; NaN where there is none.
    """
    if not models or any(not len(rows) for rows in models):
        raise InputError("models: pass the numbers of one or more examples of each model.")
    once = [torch.ones(1, len(rows), dtype=torch.float64) for rows in models]
    (value,) = statistic(*_summed(models, once))
    return _percentiles(value, statistic(*_summed(models, _times(tuple(map(len, models))))))


def alike(statistic: Statistic, models: Sequence[Sequence[Tensor]]) -> Interval:
    """An interval around the mean of a statistic over models, each of which counts alike.

    The examples of each training are drawn anew, models and trainings are not.

    Args:
        statistic: see :class:`~captum_ssm.metrics.Sample`.
        models: of each model, of each of its trainings, the numbers of the examples, (n, k); NaN
            where there is none.  A model without a number does not count.
    """
    generator, means = torch.Generator().manual_seed(0), []
    for trainings in models:
        each = []
        for rows in trainings:
            once = torch.ones(1, len(rows), dtype=torch.float64)
            times = torch.cat([once, _drawn(len(rows), len(rows), generator)])
            each.append(statistic(*_summed([rows], [times])))
        means.append(torch.stack(each).nanmean(0))
    together = torch.stack(means).nanmean(0)  # (1 + R, m)
    return _percentiles(together[0], together[1:])


def _percentiles(value: Tensor, drawn: Tensor) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = drawn.nanquantile(torch.tensor([tail, 1 - tail], dtype=drawn.dtype), dim=0)
    return Interval(low, value, high)


def _summed(models: Sequence[Tensor], times: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sums of the examples, each taken so many times (R, n), and of how many: (R, k) both."""
    parts = [
        (taken @ rows.double().nan_to_num(), taken @ (~rows.isnan()).double())
        for rows, taken in zip(models, times, strict=True)
    ]
    sums, counts = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
    return sums, counts


def _drawn(size: int, draws: int, generator: torch.Generator) -> Tensor:
    """How often each of some things is drawn, (R, size)."""
    chosen = torch.randint(size, (RESAMPLES, draws), generator=generator)
    times = torch.zeros(RESAMPLES, size, dtype=torch.float64)
    return times.scatter_add_(1, chosen, torch.ones(chosen.shape, dtype=torch.float64))


@lru_cache(maxsize=8)
def _times(sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """How often each example of models of these sizes is drawn, (R, n) each."""
    generator = torch.Generator().manual_seed(0)
    found, models = [], _drawn(len(sizes), len(sizes), generator)
    for size, draws in zip(sizes, models.unbind(1), strict=True):
        times = torch.zeros(RESAMPLES, size, dtype=torch.float64)
        for draw in range(int(draws.max())):
            times += _drawn(size, size, generator) * (draws > draw)[:, None]
        found.append(times)
    return tuple(found)
