"""Products of decays between tokens, against products factor by factor."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from oracles.kernels import decays_between

from captum_ssm.operators.kernels.within_chunk import Decays


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 31, 64])
def test_equals_the_products(tokens: int) -> None:
    decay = torch.rand(2, 3, tokens, dtype=torch.float64)
    decay = decay.where(torch.rand_like(decay) > 0.1, 0)
    found = Decays(decay)
    between = decays_between(decay)
    assert relative_error(found.between.tril(), between) <= 1e-14
    assert relative_error(found.since[..., 0], decay.cumprod(-1)) <= 1e-14
    assert relative_error(found.until[..., 0], between[..., -1, :]) <= 1e-14
    assert relative_error(found.total[..., 0, 0], decay.prod(-1)) <= 1e-14


def test_what_lies_ahead_is_no_larger_than_one() -> None:
    """It is multiplied by zeros, which must not become anything else."""
    between = Decays(torch.rand(4, 50, dtype=torch.float64)).between
    assert float(between.abs().max()) <= 1


def test_products_of_many_weak_decays_keep_their_precision() -> None:
    logs = -1e-3 * torch.rand(64, dtype=torch.float64)
    found = Decays(logs.exp().float()).between[-1, 0]
    wanted = logs.exp().float().double()[1:].prod()
    assert abs(float(found) / float(wanted) - 1) <= 2e-6
