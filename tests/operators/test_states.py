"""Recurrences taken apart: one matrix per state, and the factors of a selective scan."""

from __future__ import annotations

import pytest
import torch
from operators.kinds import KINDS, STATES, randn
from oracles import conv_matrices, diagonal_matrices, relative_error
from torch import Tensor

from captum_ssm.operators import (
    Chain,
    Diagonal,
    Operator,
    Permute,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
)
from captum_ssm.operators.readings.selection import selection_factors
from captum_ssm.operators.readings.states import state_matrices, terms_of

BATCH, TOKENS, HEADS, VALUES = 2, 7, 6, 4
SINGLE, WIDE = Shape(BATCH, TOKENS, HEADS, 1), Shape(BATCH, TOKENS, HEADS, VALUES)
TOLERANCE = 1e-12
#: Kinds that are sums over states, by what reads these.
READS = {
    "scan": "C",
    "scan of groups": "C",
    "scalar decay": "query",
    "scalar decay of one group": "query",
    "scalar decay of groups": "query",
    "vector decay": "query",
    "vector decay, bonus": "query",
}


def by_state(kind: str) -> tuple[Operator, Tensor]:
    """The operator, and its matrices (B, C, N, L, L) if one state alone is read."""
    build, single = KINDS[kind]
    case, name = build(SINGLE if single else WIDE), READS[kind]
    read = case.coefficients[name]
    each = [
        case.matrices(**{**case.coefficients, name: read * unit})
        for unit in torch.eye(STATES).double()
    ]
    return case.operator, torch.stack(each, 2)


@pytest.mark.parametrize("kind", READS)
def test_what_stands_around_passes_every_state(kind: str) -> None:
    (ahead, wanted_ahead), (back, wanted_back) = by_state(kind), by_state(kind)
    shape = ahead.shape
    gate, share, ratio = randn(*shape), randn(1, 1, 1, 1), randn(*shape)
    taps = randn(shape.heads, shape.per_head, 3)
    turn = Permute(torch.arange(TOKENS).flip(0), shape)
    operator = Chain(
        Diagonal(gate, shape, "gate"),
        Sum(Chain(ahead, ShortConv(taps, shape)), Chain(turn, Diagonal(share, shape), back, turn)),
        Diagonal(ratio, shape, "activation"),
    )
    conv = conv_matrices(taps, [0, 1, 2], shape)
    before, after = diagonal_matrices(gate, shape), diagonal_matrices(ratio, shape)
    states = torch.cat(
        [
            before[:, :, None] @ wanted_ahead @ (conv @ after)[:, :, None],
            before[:, :, None] @ (share * wanted_back).flip(-1, -2) @ after[:, :, None],
        ],
        2,
    )
    for part, wanted in ((ahead, wanted_ahead), (operator, states)):
        for channels in (list(range(wanted.shape[1])), [5, 0, 5]):
            terms = terms_of(part)
            assert terms is not None
            assert relative_error(state_matrices(terms, channels), wanted[:, channels]) <= TOLERANCE


# --- factors ---------------------------------------------------------------------------------


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
