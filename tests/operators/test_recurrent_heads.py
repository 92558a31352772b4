"""Decay heads, delta rule, elementwise recurrences, WKV and given matrices against plain loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.sessions import full
from oracles import token_loops
from torch import Tensor

from captum_ssm.operators import (
    WKV,
    Chain,
    DeltaProduct,
    DeltaRule,
    DenseHeads,
    Diagonal,
    ElementwiseRecurrence,
    HeadCentering,
    Operator,
    Permute,
    ScalarDecayHeads,
    Shape,
    ShortConv,
    Sum,
    VectorDecayHeads,
    generic,
)

BATCH, HEADS, STATE, VALUES = 2, 4, 3, 5
LENGTHS = [1, 2, 3, 64, 65, *full(63, 130)]


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def logs(*size: int) -> Tensor:
    """Logarithms of decays from almost 1 to almost 0."""
    return -torch.exp(2 * randn(*size))


def matrix_by_loops(tokens: int, entry: Callable[[int, int], Tensor]) -> Tensor:
    """(B, H, L, L) from its entries (B, H)."""
    rows = []
    for i in range(tokens):
        row = [entry(i, j) if j <= i else torch.zeros_like(entry(0, 0)) for j in range(tokens)]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def scalar_decay(tokens: int) -> tuple[Operator, Tensor]:
    groups = 2
    q, k = randn(BATCH, tokens, groups, STATE), randn(BATCH, tokens, groups, STATE)
    g, scale = logs(BATCH, tokens, HEADS), randn(BATCH, tokens, HEADS)
    per = HEADS // groups

    def entry(i: int, j: int) -> Tensor:
        product = (q[:, i] * k[:, j]).sum(-1)[:, [h // per for h in range(HEADS)]]
        return product * g[:, j + 1 : i + 1].sum(1).exp() * scale[:, j]

    return ScalarDecayHeads(q, k, g, scale, VALUES), matrix_by_loops(tokens, entry)


def vector_decay(tokens: int) -> tuple[Operator, Tensor]:
    q, k = randn(BATCH, tokens, HEADS, STATE), randn(BATCH, tokens, HEADS, STATE)
    g = logs(BATCH, tokens, HEADS, STATE)

    def entry(i: int, j: int) -> Tensor:
        return (q[:, i] * g[:, j + 1 : i + 1].sum(1).exp() * k[:, j]).sum(-1)

    return VectorDecayHeads(q, k, g, VALUES), matrix_by_loops(tokens, entry)


def vector_decay_with_bonus(tokens: int) -> tuple[Operator, Tensor]:
    q, k = randn(BATCH, tokens, HEADS, STATE), randn(BATCH, tokens, HEADS, STATE)
    g, bonus = logs(BATCH, tokens, HEADS, STATE), randn(HEADS, STATE)

    def entry(i: int, j: int) -> Tensor:
        between = bonus if i == j else g[:, j + 1 : i].sum(1).exp()
        return (q[:, i] * between * k[:, j]).sum(-1)

    return VectorDecayHeads(q, k, g, VALUES, bonus), matrix_by_loops(tokens, entry)


def delta_rule(decay: str) -> Callable[[int], tuple[Operator, Tensor]]:
    def make(tokens: int) -> tuple[Operator, Tensor]:
        q, k = randn(BATCH, tokens, HEADS, STATE), randn(BATCH, tokens, HEADS, STATE)
        k = torch.nn.functional.normalize(k, dim=-1)
        beta = 2 * torch.rand(BATCH, tokens, HEADS, dtype=torch.float64)
        g = {
            "none": None,
            "scalar": logs(BATCH, tokens, HEADS),
            "vector": logs(BATCH, tokens, HEADS, STATE),
        }[decay]
        # (Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta)
        if g is None:
            full = torch.zeros(BATCH, tokens, HEADS, STATE, dtype=torch.float64)
        else:
            full = g if g.dim() == 4 else g[..., None].expand(-1, -1, -1, STATE)

        def weighted(a: Tensor) -> Callable[[int, int], Tensor]:
            return lambda i, j: (a[:, i] * full[:, j + 1 : i + 1].sum(1).exp() * k[:, j]).sum(-1)

        reads = matrix_by_loops(tokens, weighted(q))
        writes = matrix_by_loops(tokens, weighted(k)).tril(-1)
        steps = beta.transpose(1, 2)  # (B, H, L)
        inverse = torch.linalg.inv(torch.eye(tokens).double() + steps[..., None] * writes)
        return DeltaRule(q, k, beta, g, VALUES), reads @ inverse * steps[:, :, None, :]

    return make


def delta_product(tokens: int) -> tuple[Operator, Tensor]:
    q, k = randn(BATCH, tokens, HEADS, STATE), randn(BATCH, tokens, 2, HEADS, STATE)
    beta = 2 * torch.rand(BATCH, tokens, 2, HEADS, dtype=torch.float64)
    k, g = torch.nn.functional.normalize(k, dim=-1), logs(BATCH, tokens, HEADS)
    operator = DeltaProduct(q, k, beta, g, [0, 1, 1, 0], VALUES)
    return operator, token_loops.matrices(token_loops.delta_product, operator)


def elementwise(tokens: int) -> tuple[Operator, Tensor]:
    decay = torch.rand(BATCH, tokens, HEADS, dtype=torch.float64)
    decay[0, tokens // 2] = 0  # a hard reset
    matrix = matrix_by_loops(tokens, lambda i, j: decay[:, j + 1 : i + 1].prod(1))
    return ElementwiseRecurrence(decay), matrix


def rwkv(tokens: int) -> tuple[Operator, Tensor]:
    key, decay, bonus = 5 * randn(BATCH, tokens, HEADS), -randn(HEADS).exp(), randn(HEADS)
    scores = matrix_by_loops(
        tokens, lambda i, j: bonus + key[:, i] if i == j else (i - 1 - j) * decay + key[:, j]
    )
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return WKV(key, decay, bonus), scores.masked_fill(hidden, -torch.inf).softmax(-1)


def given(tokens: int) -> tuple[Operator, Tensor]:
    matrices = randn(BATCH, HEADS, tokens, tokens)
    return DenseHeads(matrices, VALUES), matrices


CASES = {
    "scalar decay": scalar_decay,
    "vector decay": vector_decay,
    "vector decay, bonus": vector_decay_with_bonus,
    "delta rule": delta_rule("none"),
    "gated delta rule": delta_rule("scalar"),
    "vector-gated delta rule": delta_rule("vector"),
    "delta product": delta_product,
    "elementwise": elementwise,
    "wkv": rwkv,
    "given": given,
}


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_equals_the_matrix(make: Callable[[int], tuple[Operator, Tensor]], tokens: int) -> None:
    operator, matrix = make(tokens)
    per_head = operator.shape.per_head
    scale = max(1.0, float(matrix.abs().max()))
    close = {"rtol": 1e-9, "atol": 1e-11 * scale * tokens}
    v, u = randn(3, *operator.shape), randn(3, *operator.shape)
    torch.testing.assert_close(
        operator.apply(v), torch.einsum("bhij,sbjhp->sbihp", matrix, v), **close
    )
    torch.testing.assert_close(
        operator.transpose(u), torch.einsum("bhij,sbihp->sbjhp", matrix, u), **close
    )
    torch.testing.assert_close(operator.dense("mean"), matrix.mean(1), **close)
    torch.testing.assert_close(operator.dense("heads"), matrix, **close)
    torch.testing.assert_close(operator.dense(None), matrix.repeat_interleave(per_head, 1), **close)
    torch.testing.assert_close(
        operator.dense("mean", heads=[2, 0]), matrix[:, [2, 0]].mean(1), **close
    )
    left, right = randn(*operator.shape), randn(*operator.shape)
    expected = torch.einsum("bihp,bhij,bjhp->bij", left, matrix, right)
    torch.testing.assert_close(operator.contract(left, right), expected, **close)
    torch.testing.assert_close(generic.contract(operator, left, right), expected, **close)
    expected = torch.einsum("bihp,bhij,bjhp->bhij", left, matrix, right)
    torch.testing.assert_close(operator.contract_heads(left, right), expected, **close)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_differentiable_twice(make: Callable[[int], tuple[Operator, Tensor]]) -> None:
    operator, _ = make(6)
    v = randn(*operator.shape).requires_grad_()
    assert torch.autograd.gradcheck(operator.apply, v, fast_mode=True)
    assert torch.autograd.gradgradcheck(operator.apply, v, fast_mode=True)


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_both_directions_with_convolutions_at_both_ends(tokens: int) -> None:
    forward, ahead = elementwise(tokens)
    backward, behind = elementwise(tokens)
    shape = forward.shape
    flip = Permute(torch.arange(tokens).flip(0), shape)
    gate, before, after = randn(*shape), randn(HEADS, 1, 3), randn(HEADS, 1, 2)
    operator = Chain(
        Diagonal(gate, shape, "gate"),
        ShortConv(after, shape),
        Sum(forward, Chain(flip, backward, flip)),
        ShortConv(before, shape, lags=(-1, 0, 2)),
    )

    def band(weight: Tensor, lags: tuple[int, ...]) -> Tensor:
        out = torch.zeros(HEADS, tokens, tokens, dtype=torch.float64)
        for tap, lag in enumerate(lags):
            for t in range(tokens):
                if 0 <= t - lag < tokens:
                    out[:, t, t - lag] += weight[:, 0, tap]
        return out

    matrix = (
        torch.diag_embed(gate.squeeze(-1).transpose(1, 2))
        @ band(after, (0, 1))
        @ (ahead + behind.flip(-1, -2))
        @ band(before, (-1, 0, 2))
    )
    torch.testing.assert_close(operator.dense("heads"), matrix)
    torch.testing.assert_close(operator.dense("mean"), matrix.mean(1))
    left, right = randn(*shape), randn(*shape)
    torch.testing.assert_close(
        operator.contract(left, right), generic.contract(operator, left, right)
    )


def test_centering_mixes_channels_and_has_a_share_per_channel() -> None:
    shape = Shape(BATCH, 3, HEADS, VALUES)
    centering = HeadCentering(shape, randn(1))
    v, u = randn(*shape), randn(*shape)
    torch.testing.assert_close(centering.apply(v).sum(-1), torch.zeros(BATCH, 3, HEADS).double())
    torch.testing.assert_close((centering.apply(v) * u).sum(), (v * centering.transpose(u)).sum())
    share = Chain(centering, centering).per_channel().dense("mean")
    torch.testing.assert_close(share, (1 - 1 / VALUES) ** 2 * torch.eye(3).double().expand(2, 3, 3))


def test_keys_far_apart_stay_finite() -> None:
    key = torch.tensor([-300.0, 300.0, 0.0, 290.0])[None, :, None]
    operator = WKV(key, torch.tensor([-5.0]), torch.tensor([100.0]))
    rows = operator.dense("mean").sum(-1)
    torch.testing.assert_close(rows, torch.ones(1, 4))
