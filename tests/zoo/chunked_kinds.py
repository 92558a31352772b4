"""Random heads of every kind that is computed chunk by chunk, and what their matrices do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import token_loops
from torch import Tensor
from torch.nn.functional import normalize

from captum_ssm.operators import DeltaRule, Operator, ScalarDecayHeads, VectorDecayHeads
from captum_ssm.operators.heads import HeadOperator

EXACT = 1e-12
HEADS, STATE, VALUES = 4, 6, 5


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def mild(*size: int) -> Tensor:
    """Logarithms of decays between almost 1 and almost 0."""
    return -torch.exp(2 * randn(*size) - 2)


def resets(*size: int) -> Tensor:
    """Some tokens forget everything."""
    return mild(*size).masked_fill(torch.rand(*size) < 0.1, -torch.inf)


def strong(*size: int) -> Tensor:
    return torch.full(size, -80.0, dtype=torch.float64)


def none(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.float64)


DECAYS = {"mild": mild, "resets": resets, "strong": strong, "no decay": none}
Logs = Callable[..., Tensor]


def scalar(tokens: int, logs: Logs = mild, batch: int = 2, groups: int = 2) -> ScalarDecayHeads:
    q, k = randn(2, batch, tokens, groups, STATE)
    scale = randn(batch, tokens, HEADS)
    return ScalarDecayHeads(q, k, logs(batch, tokens, HEADS), scale, VALUES)


def scalar_of_own_keys(tokens: int, logs: Logs = mild, batch: int = 2) -> ScalarDecayHeads:
    q, k = randn(2, batch, tokens, HEADS, STATE)
    return ScalarDecayHeads(q, k, logs(batch, tokens, HEADS), None, VALUES)


def vector(tokens: int, logs: Logs = mild, batch: int = 2) -> VectorDecayHeads:
    q, k = randn(2, batch, tokens, HEADS, STATE)
    return VectorDecayHeads(q, k, logs(batch, tokens, HEADS, STATE), VALUES)


def vector_with_bonus(tokens: int, logs: Logs = mild, batch: int = 2) -> VectorDecayHeads:
    operator = vector(tokens, logs, batch)
    return VectorDecayHeads(
        operator.query, operator.key, operator.log_decay, VALUES, randn(HEADS, STATE)
    )


def delta(kind: int | None) -> Callable[..., DeltaRule]:
    """A decay per head (3 dimensions), per key channel (4), or none."""

    def make(tokens: int, logs: Logs = mild, batch: int = 2) -> DeltaRule:
        q, k = randn(2, batch, tokens, HEADS, STATE)
        beta = 2 * torch.rand(batch, tokens, HEADS, dtype=torch.float64)
        decay = None if kind is None else logs(*(batch, tokens, HEADS, STATE)[:kind])
        return DeltaRule(q, normalize(k, dim=-1), beta, decay, VALUES)

    return make


def erasing(kind: int | None, own_steps: bool = True) -> Callable[..., DeltaRule]:
    """A delta rule that erases by a key of its own, and as much as each channel says."""

    def make(tokens: int, logs: Logs = mild, batch: int = 2) -> DeltaRule:
        given = delta(kind)(tokens, logs, batch)
        erase = normalize(randn(*given.key.shape), dim=-1)
        step = torch.rand(*given.key.shape, dtype=torch.float64) if own_steps else None
        return DeltaRule(
            given.query, given.key, given.beta, given.log_decay, VALUES,
            erase=erase, erase_step=step,
        )  # fmt: skip

    return make


Make = Callable[..., HeadOperator]
KINDS: dict[str, tuple[Make, token_loops.Loop]] = {
    "scalar decay": (scalar, token_loops.scalar_decay),
    "scalar decay, own keys": (scalar_of_own_keys, token_loops.scalar_decay),
    "vector decay": (vector, token_loops.vector_decay),
    "vector decay, bonus": (vector_with_bonus, token_loops.vector_decay),
    "delta rule": (delta(None), token_loops.delta_rule),
    "gated delta rule": (delta(3), token_loops.delta_rule),
    "vector-gated delta rule": (delta(4), token_loops.delta_rule),
    "delta rule, two keys": (erasing(None), token_loops.delta_rule),
    "gated delta rule, two keys": (erasing(3), token_loops.delta_rule),
    "vector-gated delta rule, two keys": (erasing(4), token_loops.delta_rule),
    "gated delta rule, asked by another key": (erasing(3, False), token_loops.delta_rule),
}

kinds = pytest.mark.parametrize(("make", "loop"), KINDS.values(), ids=KINDS)


def applied(matrices: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,...bjhp->...bihp", matrices, v)


def contracted(matrices: Tensor, left: Tensor, right: Tensor, operator: Operator) -> Tensor:
    left, right = left.expand(operator.shape), right.expand(operator.shape)
    return torch.einsum("bihp,bhij,bjhp->bhij", left, matrices, right)
