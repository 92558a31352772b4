"""Recurrences computed chunk by chunk, held against loops over single tokens in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.sessions import full
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import relative_error, token_loops
from torch import Tensor
from zoo.chunked_kinds import (
    DECAYS,
    EXACT,
    HEADS,
    KINDS,
    Logs,
    Make,
    applied,
    contracted,
    kinds,
    mild,
    randn,
    resets,
)

from captum_ssm.operators.heads import HeadOperator
from captum_ssm.operators.kernels import chunks
from captum_ssm.operators.kernels.chunks import CHUNK
from captum_ssm.operators.recurrences import vector_decay

LENGTHS = [1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17]
LONG = full(9 * CHUNK + 5)


@pytest.mark.parametrize("tokens", [*LENGTHS, *LONG])
@kinds
def test_equals_the_loop(make: Make, loop: token_loops.Loop, tokens: int) -> None:
    operator = make(tokens)
    v, u = randn(*operator.shape), randn(*operator.shape)
    assert relative_error(operator.apply(v), loop(operator, v)) <= EXACT
    wanted = applied(token_loops.matrices(loop, operator).mT, u)
    assert relative_error(operator.transpose(u), wanted) <= EXACT


@pytest.mark.parametrize("few", [0, 100], ids=["many vectors", "few vectors"])
@pytest.mark.parametrize("logs", [mild, resets], ids=["mild", "resets"])
@kinds
def test_chunks_held_one_or_two_at_a_time(
    monkeypatch: pytest.MonkeyPatch, make: Make, loop: token_loops.Loop, logs: Logs, few: int
) -> None:
    """A state is carried from what is held to what is held next."""
    monkeypatch.setattr(chunks, "FEW", few)
    monkeypatch.setattr(vector_decay, "_STATE_ELEMENTS", 5000)
    operator = make(3 * CHUNK + 9, logs, batch=1)
    matrices = token_loops.matrices(loop, operator)
    v, u, left, right = randn(4, *operator.shape)
    for each in (1, 2):
        monkeypatch.setattr(chunks, "_HELD", each * HEADS * CHUNK)
        assert relative_error(operator.apply(v), applied(matrices, v)) <= EXACT
        assert relative_error(operator.transpose(u), applied(matrices.mT, u)) <= EXACT
        wanted = contracted(matrices, left, right, operator).sum(1)
        assert relative_error(operator.contract(left, right), wanted) <= EXACT
        strip = operator.strip(left, right, range(70, 180))
        assert relative_error(strip.entries, wanted[:, 70:180, :180]) <= EXACT


@pytest.mark.parametrize("logs", DECAYS.values(), ids=DECAYS)
@kinds
def test_any_decay(make: Make, loop: token_loops.Loop, logs: Logs) -> None:
    operator = make(CHUNK + 9, logs)
    matrices = token_loops.matrices(loop, operator)
    v, left, right = randn(3, *operator.shape)
    assert relative_error(operator.apply(v), applied(matrices, v)) <= EXACT
    assert relative_error(operator.transpose(v), applied(matrices.mT, v)) <= EXACT
    assert relative_error(operator.head_matrices(), matrices) <= EXACT
    wanted = contracted(matrices, left, right, operator).sum(1)
    assert relative_error(operator.contract(left, right), wanted) <= EXACT
    assert relative_error(operator.dense("mean"), matrices.mean(1)) <= EXACT


@kinds
def test_stacks_of_any_number_of_channels(make: Make, loop: token_loops.Loop) -> None:
    operator = make(CHUNK + 3)
    batch, tokens, heads, _ = operator.shape
    matrices = token_loops.matrices(loop, operator)
    for size in (
        (batch, tokens, heads, 1),
        (3, batch, tokens, heads, 5),
        (2, 1, batch, tokens, heads, 2),
    ):
        v = randn(*size)
        assert relative_error(operator.apply(v), applied(matrices, v)) <= EXACT
        assert relative_error(operator.transpose(v), applied(matrices.mT, v)) <= EXACT


@pytest.mark.parametrize("logs", [mild, resets], ids=["mild", "resets"])
@kinds
def test_single_precision(make: Make, loop: token_loops.Loop, logs: Logs) -> None:
    operator = in_single_precision(make(3 * CHUNK + 1, logs))
    matrices = token_loops.matrices(loop, operator)
    v, left, right = torch.randn(3, *operator.shape)
    found = [
        (operator.apply(v), applied(matrices, v.double())),
        (operator.transpose(v), applied(matrices.mT, v.double())),
        (operator.dense("mean"), matrices.mean(1)),
        (
            operator.contract(left, right),
            contracted(matrices, left.double(), right.double(), operator).sum(1),
        ),
    ]
    for result, wanted in found:
        assert result.dtype == torch.float32
        assert relative_error(result, wanted) <= 5e-6


def in_single_precision(operator: HeadOperator) -> HeadOperator:
    for name, value in vars(operator).items():
        if isinstance(value, Tensor):
            setattr(operator, name, value.float())
    return operator


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 2 * CHUNK + 2),
    batch=st.integers(1, 3),
    kind=st.sampled_from(list(KINDS)),
    decay=st.sampled_from(list(DECAYS)),
)
def test_anything_equals_the_loop(tokens: int, batch: int, kind: str, decay: str) -> None:
    make, loop = KINDS[kind]
    operator = make(tokens, DECAYS[decay], batch)
    v = randn(*operator.shape)
    assert relative_error(operator.apply(v), loop(operator, v)) <= EXACT
