"""Gathering over batches: parts merge into the whole, intervals cover what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from captum_ssm.metrics import Curve, Sample


def sampled(values: torch.Tensor) -> Sample:
    sample = Sample()
    sample.update(values)
    return sample


def test_undefined_numbers_do_not_count():
    values = torch.tensor([[1.0, math.nan], [math.nan, math.nan], [4.0, math.nan]])
    sample = sampled(values)
    assert sample.value()[0] == 2.5 and sample.value()[1].isnan()
    assert sample.undefined().tolist() == [1, 3]
    low, value, high = sample.interval(resamples=50)
    assert low[0] >= 1 and high[0] <= 4 and value[0] == 2.5
    assert low[1].isnan() and high[1].isnan()


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), min_size=2, max_size=5))
def test_merged_parts_are_the_whole(sizes):
    sizes[0] += 1
    values = torch.randn(sum(sizes), 2, dtype=torch.float64)
    values[values > 1.5] = math.nan
    parts = [sampled(part) for part in values.split(sizes)]
    first = parts[0]
    for part in parts[1:]:
        first.merge(part)
    whole = sampled(values)
    assert torch.equal(first.rows.isnan(), values.isnan())
    torch.testing.assert_close(first.value(), whole.value(), equal_nan=True)
    for ours, theirs in zip(
        first.interval(resamples=20), whole.interval(resamples=20), strict=True
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_interval_like_a_plain_bootstrap():
    values = torch.randn(60, dtype=torch.float64).exp()
    low, value, high = sampled(values).interval(0.9, resamples=4000)
    draws = np.random.default_rng(0).choice(values.numpy(), (4000, 60)).mean(1)
    expected = np.quantile(draws, [0.05, 0.95])
    spread = expected[1] - expected[0]
    assert abs(low.item() - expected[0]) < 0.15 * spread
    assert abs(high.item() - expected[1]) < 0.15 * spread
    assert low < value < high


@pytest.mark.slow
def test_area_by_trapezoids():
    curve = Curve(torch.tensor([0.1, 0.2, 0.5]), torch.tensor([[1.0, 0.0, 0.6], [2.0, 2.0, 2.0]]))
    torch.testing.assert_close(curve.area(normalized=False), torch.tensor([0.14, 0.8]))
    torch.testing.assert_close(curve.area(), torch.tensor([0.35, 2.0]))
    torch.testing.assert_close(curve.mean(), torch.tensor([1.5, 1.0, 1.3]))
    metrics = pytest.importorskip("sklearn.metrics")
    values = torch.rand(1, 9, dtype=torch.float64)
    at = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    expected = metrics.auc(at, values[0])
    assert Curve(at, values).area(normalized=False).item() == pytest.approx(expected)
