"""Intervals of one model are over its examples; of several, over the models, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.metrics import Sample
from captum_ssm.metrics.sample import mean
from captum_ssm_bench.harness.spread import alike, interval


def ratio(sums: Tensor, _: Tensor) -> Tensor:
    return sums[..., :1] / sums[..., 1:]


def test_one_model_has_the_interval_of_a_sample() -> None:
    """But for the draws, which are others."""
    rows = torch.rand(60, 2) + 0.5
    sample = Sample(ratio)
    sample.update(rows)
    one, other = interval(ratio, [rows]), sample.interval(resamples=4000, seed=1)
    width = float(other.high - other.low)
    assert float(one.value) == pytest.approx(float(other.value), rel=1e-12)
    assert float(one.low) == pytest.approx(float(other.low), abs=0.15 * width)
    assert float(one.high) == pytest.approx(float(other.high), abs=0.15 * width)


def test_the_same_numbers_have_the_same_interval() -> None:
    models = [torch.rand(11, 1), torch.rand(7, 1)]
    for one, other in zip(interval(mean, models), interval(mean, models), strict=True):
        assert torch.equal(one, other)


def test_models_that_differ_widen_the_interval() -> None:
    """Two models with constant examples: either is drawn twice a quarter of the time."""
    found = interval(mean, [torch.zeros(9, 1), torch.ones(3, 1)])
    assert float(found.value) == 0.25
    assert (float(found.low), float(found.high)) == (0.0, 1.0)


def test_several_models_against_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [rng.normal(shift, 1.0, size=(40, 1)) for shift in rng.normal(0, 1.0, size=4)]
    drawn = []
    for _ in range(4000):
        parts = [models[i] for i in rng.integers(4, size=4)]
        drawn.append(np.mean(np.concatenate([p[rng.integers(40, size=40)] for p in parts])))
    low, value, high = (float(x) for x in interval(mean, [torch.tensor(m) for m in models]))
    assert value == pytest.approx(np.mean(np.concatenate(models)))
    width = np.std(drawn)
    assert low == pytest.approx(np.quantile(drawn, 0.025), abs=0.3 * width)
    assert high == pytest.approx(np.quantile(drawn, 0.975), abs=0.3 * width)


def test_numbers_that_an_example_lacks_do_not_count() -> None:
    nan = float("nan")
    found = interval(mean, [torch.tensor([[2.0], [nan]]), torch.tensor([[nan], [2.0]])])
    assert [float(x) for x in found] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("models", [[], [torch.rand(3, 1), torch.rand(0, 1)]])
def test_nothing_to_draw(models: list[Tensor]) -> None:
    with pytest.raises(InputError, match="one or more examples of each model"):
        interval(mean, models)


def test_models_that_count_alike_are_not_drawn_anew() -> None:
    found = alike(mean, [[torch.zeros(90, 1)], [torch.ones(3, 1), torch.full((50, 1), 3.0)]])
    assert [float(part) for part in found] == [1.0, 1.0, 1.0]


def test_models_that_count_alike_against_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [rng.normal(0, spread, size=(count, 1)) for spread, count in ((1, 40), (3, 25))]
    drawn = [
        np.mean([part[rng.integers(len(part), size=len(part))].mean() for part in models])
        for _ in range(4000)
    ]
    low, value, high = (float(x) for x in alike(mean, [[torch.tensor(m)] for m in models]))
    assert value == pytest.approx(np.mean([part.mean() for part in models]))
    width = np.std(drawn)
    assert low == pytest.approx(np.quantile(drawn, 0.025), abs=0.3 * width)
    assert high == pytest.approx(np.quantile(drawn, 0.975), abs=0.3 * width)


def test_a_model_without_a_number_does_not_count_among_those_alike() -> None:
    nothing = torch.full((4, 1), float("nan"))
    assert float(alike(mean, [[nothing], [torch.ones(4, 1)]]).value) == 1.0
