"""The factors of a selective scan where numbers are extreme."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.operators import SelectiveScan
from captum_ssm.operators.readings.selection import selection_factors
from captum_ssm.operators.readings.states import terms_of


@pytest.mark.parametrize("step", [1e-30, 1e-6, 0.5, 0.6931, 0.6932, 1.0, 30.0, 1e4])
def test_softplus_is_inverted_at_any_size(step: float) -> None:
    """relu(log(e^dt - 1)) is the largest S_Delta that is not negative: log1p without overflow."""
    dt = torch.tensor([[[0.0]], [[step]]])
    one = torch.ones(2, 1, 1)
    (terms,) = [terms_of(SelectiveScan(dt, -torch.ones(1, 1), one, one))]
    assert terms is not None
    factors = selection_factors(terms, [0], simplified=True)
    assert factors is not None
    exact = torch.tensor(step).double()
    wanted = (exact + torch.log1p(-torch.exp(-exact))).relu()
    assert factors.key[0] == 0
    assert abs(float(factors.key[1]) - float(wanted)) <= 2e-7 * max(1.0, step)
