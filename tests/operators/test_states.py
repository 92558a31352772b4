"""Recurrences taken apart: one matrix per state, and the factors of a selective scan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import conv_matrices, diagonal_matrices, relative_error
from torch import Tensor

from captum_ssm.operators import (
    WKV,
    Chain,
    DeltaRule,
    DenseHeads,
    Diagonal,
    ElementwiseRecurrence,
    Operator,
    Permute,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
    VectorDecayHeads,
)
from captum_ssm.operators.readings.selection import selection_factors
from captum_ssm.operators.readings.states import state_matrices, terms_of

BATCH, TOKENS, HEADS, STATE, VALUES = 2, 7, 6, 3, 4
TOLERANCE = 1e-12


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def logs(*size: int) -> Tensor:
    """Logarithms of decays from almost 1 to almost 0."""
    return -torch.exp(2 * randn(*size))


def state_by_state(
    query: Tensor, key: Tensor, log_decay: Tensor, per_head: int, bonus: Tensor | None = None
) -> Tensor:
    """Eq. 16 for factors and decays (B, L, H, N), by loops: (B, H P, N, L, L)."""
    batch, tokens, heads, state = query.shape
    out = torch.zeros(batch, heads, state, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            decay = torch.ones(batch, heads, state, dtype=torch.float64)
            for k in range(j + 1, i if bonus is not None else i + 1):
                decay = decay * log_decay[:, k].exp()
            if bonus is not None and i == j:
                decay = bonus.expand_as(decay)
            out[..., i, j] = query[:, i] * decay * key[:, j]
    return out.repeat_interleave(per_head, 1)


def selective(groups: int | None) -> tuple[Operator, Tensor]:
    shared = (BATCH, TOKENS, STATE) if groups is None else (BATCH, TOKENS, groups, STATE)
    dt, a, b, c = (
        randn(BATCH, TOKENS, HEADS).exp(),
        logs(HEADS, STATE),
        randn(*shared),
        randn(*shared),
    )
    key, query = (
        (x[:, :, None] if groups is None else x).repeat_interleave(HEADS // (groups or 1), 2)
        for x in (b, c)
    )
    wanted = state_by_state(query, key * dt[..., None], dt[..., None] * a, 1)
    return SelectiveScan(dt, a, b, c), wanted


def scalar(scaled: bool) -> tuple[Operator, Tensor]:
    query, key = randn(BATCH, TOKENS, 2, STATE), randn(BATCH, TOKENS, 2, STATE)
    log_decay = logs(BATCH, TOKENS, HEADS)
    scale = randn(BATCH, TOKENS, HEADS) if scaled else None
    each = [x.repeat_interleave(HEADS // 2, 2) for x in (query, key)]
    written = each[1] if scale is None else each[1] * scale[..., None]
    decays = log_decay[..., None].expand_as(written)
    wanted = state_by_state(each[0], written, decays, VALUES)
    return ScalarDecayHeads(query, key, log_decay, scale, VALUES), wanted


def vector(with_bonus: bool) -> tuple[Operator, Tensor]:
    size = BATCH, TOKENS, HEADS, STATE
    query, key, log_decay = randn(*size), randn(*size), logs(*size)
    bonus = randn(HEADS, STATE) if with_bonus else None
    wanted = state_by_state(query, key, log_decay, VALUES, bonus)
    return VectorDecayHeads(query, key, log_decay, VALUES, bonus), wanted


SCANS: dict[str, Callable[[], tuple[Operator, Tensor]]] = {
    "selective": lambda: selective(None),
    "selective, grouped": lambda: selective(2),
    "selective, one group": lambda: selective(1),
    "scalar": lambda: scalar(False),
    "scalar, scaled": lambda: scalar(True),
    "vector": lambda: vector(False),
    "vector, bonus": lambda: vector(True),
}


def matrices_of(operator: Operator, channels: list[int]) -> Tensor:
    terms = terms_of(operator)
    assert terms is not None
    return state_matrices(terms, channels)


@pytest.mark.parametrize("make", SCANS.values(), ids=SCANS.keys())
def test_a_scan_alone(make: Callable[[], tuple[Operator, Tensor]]) -> None:
    scan, wanted = make()
    count = scan.shape.heads * scan.shape.per_head
    for channels in (list(range(count)), [5, 0, 5], [count - 1]):
        found = matrices_of(scan, channels)
        assert found.is_contiguous()
        assert relative_error(found, wanted[:, channels]) <= TOLERANCE
    assert relative_error(wanted.sum(2), scan.dense(None)) <= TOLERANCE


@pytest.mark.parametrize("make", SCANS.values(), ids=SCANS.keys())
def test_what_stands_around_passes_every_state(
    make: Callable[[], tuple[Operator, Tensor]],
) -> None:
    (ahead, wanted_ahead), (back, wanted_back) = make(), make()
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
    channels = [1, shape.heads * shape.per_head - 1]
    found = matrices_of(operator, channels)
    assert found.shape[2] == 2 * STATE
    assert relative_error(found, states[:, channels]) <= TOLERANCE
    assert relative_error(found.sum(2), operator.dense(None)[:, channels]) <= TOLERANCE


def no_sums_over_states() -> dict[str, Operator]:
    shape = Shape(BATCH, TOKENS, HEADS, 1)
    scan = selective(None)[0]
    size = BATCH, TOKENS, HEADS, STATE
    beta = torch.rand(BATCH, TOKENS, HEADS)
    return {
        "delta rule": DeltaRule(randn(*size), randn(*size), beta.double(), None, VALUES),
        "given matrices": DenseHeads(randn(BATCH, HEADS, TOKENS, TOKENS), VALUES),
        "one state": ElementwiseRecurrence(torch.rand(BATCH, TOKENS, HEADS)),
        "wkv": WKV(randn(BATCH, TOKENS, HEADS), -torch.rand(HEADS).double(), randn(HEADS)),
        "a skip": Sum(scan, Diagonal(randn(1, 1, HEADS, 1), shape)),
        "two in a row": Chain(scan, selective(None)[0]),
        "none": Diagonal(randn(1, 1, HEADS, 1), shape),
        "one in front": Chain(ElementwiseRecurrence(torch.rand(BATCH, TOKENS, HEADS)), scan),
    }


@pytest.mark.parametrize("name", no_sums_over_states())
def test_what_is_no_sum_over_states(name: str) -> None:
    assert terms_of(no_sums_over_states()[name]) is None


# --- factors ---------------------------------------------------------------------------------


def factors_of(operator: Operator, channels: list[int], simplified: bool = False) -> object:
    terms = terms_of(operator)
    assert terms is not None
    return selection_factors(terms, channels, simplified)


def test_scans_without_steps_have_no_factors() -> None:
    size = BATCH, TOKENS, HEADS, STATE
    unscaled = ScalarDecayHeads(randn(*size), randn(*size), logs(*size[:3]), None, 1, rate=logs(6))
    taps = ShortConv(randn(HEADS, 1, 2), Shape(BATCH, TOKENS, HEADS, 1))
    scan = selective(None)[0]
    for operator in (
        scalar(True)[0],
        vector(False)[0],
        unscaled,
        Chain(taps, scan),
        Chain(scan, taps),
        Sum(scan, unscaled),
    ):
        assert factors_of(operator, [0]) is None
    assert factors_of(scan, [0]) is not None


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
    query, key = randn(BATCH, TOKENS, 2, STATE), randn(BATCH, TOKENS, 2, STATE)
    dt, rate = randn(BATCH, TOKENS, HEADS).exp(), logs(HEADS)
    scan = ScalarDecayHeads(query, key, rate * dt, dt, VALUES, rate=rate)
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


def test_selected_heads_keep_their_rate() -> None:
    query, key = randn(BATCH, TOKENS, 2, STATE), randn(BATCH, TOKENS, 2, STATE)
    dt, rate = randn(BATCH, TOKENS, HEADS).exp(), logs(HEADS)
    scan = ScalarDecayHeads(query, key, rate * dt, dt, VALUES, rate=rate)
    chosen = scan.select([4, 1])
    assert isinstance(chosen, ScalarDecayHeads) and chosen.rate is not None
    assert torch.equal(chosen.rate, rate[[4, 1]])
    assert torch.equal(chosen.log_decay, chosen.rate * dt[:, :, [4, 1]])
