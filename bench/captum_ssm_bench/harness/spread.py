"""Intervals over the examples of one model, or over several trained models and their examples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.metrics.sample import Interval, Statistic

CONFIDENCE = 0.95
RESAMPLES = 1000


def interval(statistic: Statistic, models: Sequence[Tensor]) -> Interval:
    """A percentile bootstrap interval, the same one for the same numbers.

    With one model its examples are drawn anew, with replacement.  With several, models are drawn
    anew, and examples of each one drawn: training again changes results, too.

    Args:
        statistic: see :class:`~captum_ssm.metrics.Sample`.
        models: the numbers of each model's examples, (n, k) each; NaN where there is none.

    Returns:
        The bounds around the statistic of all examples of all models together.
    """
    if not models or any(not len(rows) for rows in models):
        raise InputError("models: pass the numbers of one or more examples of each model.")
    once = [torch.ones(1, len(rows), dtype=torch.float64) for rows in models]
    (value,) = statistic(*_summed(models, once))
    return _percentiles(value, statistic(*_summed(models, _times(tuple(map(len, models))))))


def alike(statistic: Statistic, models: Sequence[Sequence[Tensor]]) -> Interval:
    """An interval around the mean of a statistic over models, each of which counts alike.

    The examples of each training are drawn anew, models and trainings are not: what is said is said
    of these models.

    Args:
        statistic: see :class:`~captum_ssm.metrics.Sample`.
        models: of each model, of each of its trainings, the numbers of the examples, (n, k); NaN
            where there is none.

    Returns:
        The bounds around the mean, in which a model without a number does not count.
    """
    generator = torch.Generator().manual_seed(0)
    means = []
    for trainings in models:
        each = [_alone(statistic, rows, generator) for rows in trainings]
        means.append(torch.stack(each).nanmean(0))
    together = torch.stack(means).nanmean(0)  # (1 + RESAMPLES, m)
    return _percentiles(together[0], together[1:])


def _alone(statistic: Statistic, rows: Tensor, generator: torch.Generator) -> Tensor:
    """The statistic of the examples themselves, then of each resample of them."""
    chosen = torch.randint(len(rows), (RESAMPLES, len(rows)), generator=generator)
    times = torch.zeros(RESAMPLES, len(rows), dtype=torch.float64)
    times.scatter_add_(1, chosen, torch.ones_like(times))
    once = torch.ones(1, len(rows), dtype=torch.float64)
    return statistic(*_summed([rows], [torch.cat([once, times])]))


def _percentiles(value: Tensor, drawn: Tensor) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = drawn.nanquantile(torch.tensor([tail, 1 - tail], dtype=drawn.dtype), dim=0)
    return Interval(low, value, high)


def _summed(models: Sequence[Tensor], times: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sums of the examples, each taken so many times, and of how many: (R, k) both.

    Args:
        models: (n, k) each.
        times: (R, n) each.
    """
    parts = [
        (taken @ rows.double().nan_to_num(), taken @ (~rows.isnan()).double())
        for rows, taken in zip(models, times, strict=True)
    ]
    sums, counts = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
    return sums, counts


@lru_cache(maxsize=8)
def _times(sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """How often each example of models of these sizes is drawn, (RESAMPLES, n) each."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(sizes), (RESAMPLES, len(sizes)), generator=generator)
    found = []
    for model, size in enumerate(sizes):
        draws = (chosen == model).sum(1)  # how often the model itself is drawn
        times = torch.zeros(RESAMPLES, size, dtype=torch.float64)
        for draw in range(int(draws.max())):
            drawn = torch.randint(size, times.shape, generator=generator)
            times.scatter_add_(1, drawn, (draws > draw).double()[:, None].expand_as(times))
        found.append(times)
    return tuple(found)
