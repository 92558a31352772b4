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


def interval(
    statistic: Statistic, models: Sequence[Tensor], *, over_models: bool = False
) -> Interval:
    """A percentile bootstrap interval around the mean of a statistic over models.

    The examples of each model are drawn anew, with replacement; models are not.  The same numbers
    give the same interval.

    Args:
        statistic: see :class:`~captum_ssm.metrics.Sample`.
        models: the numbers of each model's examples, (n, k) each; NaN where there is none.  A model
            without a number does not count.
        over_models: whether models are drawn anew, and not their examples. Default: False.
    """
    if not models or any(not len(rows) for rows in models):
        raise InputError("models: pass the numbers of one or more examples of each model.")
    found = []
    for place, rows in enumerate(models):
        times = _times(len(rows), place)
        counts = times @ (~rows.isnan()).double()
        found.append(statistic(times @ rows.double().nan_to_num(), counts))
    means = torch.stack(found).nanmean(0)  # of the whole, and R of draws, (1 + R, m)
    if over_models:
        whole = torch.stack(found)[:, 0]
        times = _times(len(models), 0)
        means = (times @ whole.nan_to_num()) / (times @ (~whole.isnan()).double())
    value, *drawn = means
    tail = (1 - CONFIDENCE) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=value.dtype)
    low, high = torch.stack(drawn).nanquantile(ends, dim=0)
    return Interval(low, value, high)


@lru_cache(maxsize=64)
def _times(size: int, place: int) -> Tensor:
    """How often each of a model's examples counts: once, and as it is drawn, (1 + R, n)."""
    generator = torch.Generator().manual_seed(place)
    chosen = torch.randint(size, (RESAMPLES, size), generator=generator)
    drawn = torch.zeros(RESAMPLES, size, dtype=torch.float64)
    drawn.scatter_add_(1, chosen, torch.ones_like(drawn))
    return torch.cat([torch.ones_like(drawn[:1]), drawn])
