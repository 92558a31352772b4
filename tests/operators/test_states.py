"""The factors of a selective scan where numbers are extreme and channels many."""

from __future__ import annotations

import pytest
import torch
from operators.kinds import STATES, randn
from oracles import relative_error

from captum_ssm.operators import (
    Chain,
    Diagonal,
    Permute,
    ScalarDecayHeads,
    SelectiveScan,
    ShortConv,
)
from captum_ssm.operators.readings.selection import selection_factors
from captum_ssm.operators.readings.states import state_matrices, terms_of

BATCH, TOKENS, HEADS, VALUES = 2, 7, 6, 4
TOLERANCE = 1e-12


def grouped() -> ScalarDecayHeads:
    """Of steps and a rate for each head."""
    query, key = randn(BATCH, TOKENS, 2, STATES), randn(BATCH, TOKENS, 2, STATES)
    dt, rate = randn(BATCH, TOKENS, HEADS).exp(), -randn(HEADS).exp()
    return ScalarDecayHeads(query, key, rate * dt, dt, VALUES, rate=rate)


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


def test_values_of_a_head_are_scaled_each_by_its_own() -> None:
    """One-tap filters and diagonals with factors per value channel, on both sides."""
    scan = grouped()
    shape = scan.shape
    order = torch.randperm(TOKENS)
    operator = Chain(
        ShortConv(randn(HEADS, VALUES, 1), shape),
        Permute(order, shape),
        Diagonal(randn(*shape), shape),
        scan,
        Diagonal(randn(*shape), shape),
        Permute(order.argsort(), shape),
        Diagonal(randn(*shape), shape),
    )
    channels = [23, 9, 2]
    terms = terms_of(operator)
    assert terms is not None
    factors = selection_factors(terms, channels, simplified=False)
    assert factors is not None
    assert relative_error(factors.states().sum(2), operator.dense(None)[:, channels]) <= TOLERANCE
    assert relative_error(factors.states(), state_matrices(terms, channels)) <= TOLERANCE
