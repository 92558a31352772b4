"""Recurrences that hear their own outputs, and what a channel of them passes to itself."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import Chain, FeedbackRecurrence, HeadCentering, Shape
from captum_ssm.operators.recurrences.own_shares import OwnShares


def drawn(tokens: int, heads: int = 3, per_head: int = 4) -> FeedbackRecurrence:
    factors = torch.rand(3, 2, tokens, heads, per_head, dtype=torch.float64)
    feedback = torch.randn(heads, per_head, per_head, dtype=torch.float64)
    return FeedbackRecurrence(*factors, feedback)


def by_token(operator: FeedbackRecurrence, v: Tensor) -> Tensor:
    """Token after token, number after number of a head."""
    out = torch.zeros_like(v)
    for h in range(v.shape[-2]):
        c = y = torch.zeros_like(v[..., 0, h, :])
        for t in range(v.shape[-3]):
            entered = torch.stack([v[..., t, h, p] + y @ r for p, r in enumerate(
                operator.feedback[h])], -1)  # fmt: skip
            c = operator.decay[:, t, h] * c + operator.write[:, t, h] * entered
            y = operator.gate[:, t, h] * c
            out[..., t, h, :] = y
    return out


def whole(operator: FeedbackRecurrence) -> Tensor:
    """What reaches channel c of token i from channel d of token j, (B, H, L, P, L, P)."""
    batch, tokens, heads, per_head = operator.shape
    units = torch.eye(tokens * per_head, dtype=torch.float64).view(-1, tokens, per_head)
    stack = units[:, None, :, None].expand(-1, batch, -1, heads, -1)
    columns = by_token(operator, stack)  # (L P, B, L, H, P)
    return torch.unflatten(columns, 0, (tokens, per_head)).permute(2, 4, 3, 5, 0, 1)


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_the_map_and_its_adjoint(tokens: int, lead: tuple[int, ...]) -> None:
    operator = drawn(tokens)
    v, u = torch.randn(2, *lead, *operator.shape, dtype=torch.float64)
    assert relative_error(operator.apply(v), by_token(operator, v)) <= 1e-13
    taken = torch.einsum("bhipjq,...bihp->...bjhq", whole(operator), u)
    assert relative_error(operator.transpose(u), taken) <= 1e-13


def test_it_is_differentiable_in_its_values() -> None:
    operator = drawn(3, heads=1, per_head=2)
    v = torch.randn(operator.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(operator.apply, (v,))
    assert torch.autograd.gradcheck(operator.transpose, (v,))


def test_the_own_shares_of_channels() -> None:
    operator = drawn(6)
    wanted = whole(operator).diagonal(dim1=3, dim2=5).permute(0, 1, 4, 2, 3)  # (B, H, P, L, L)
    own = operator.per_channel()
    assert isinstance(own, OwnShares) and own.per_channel() is own
    assert own.component == "scan" and own.mixing.value == "controlled"
    assert relative_error(own.dense(None), wanted.flatten(1, 2)) <= 1e-13
    assert relative_error(own.dense(), wanted.flatten(1, 2).mean(1)) <= 1e-13
    assert relative_error(own.rows([4], "heads")[:, :, 0], wanted.mean(2)[:, :, 4]) <= 1e-13
    v = torch.randn(operator.shape, dtype=torch.float64)
    product = torch.einsum("bhpij,bjhp->bihp", wanted, v)
    assert relative_error(own.apply(v), product) <= 1e-13
    assert relative_error(own.select([2]).apply(v[:, :, 2:]), product[:, :, 2:]) <= 1e-13


@pytest.mark.parametrize("heads", [[0], [2, 0], [1, 2]])
def test_some_heads(heads: list[int]) -> None:
    operator = drawn(5)
    v = torch.randn(operator.shape, dtype=torch.float64)
    found = operator.select(heads).apply(v[:, :, heads])
    assert relative_error(found, by_token(operator, v)[:, :, heads]) <= 1e-13


def test_a_step_leaves_what_it_leaves_in_the_loop() -> None:
    operator = drawn(5)
    v = torch.randn(operator.shape, dtype=torch.float64)
    states = operator.states(v)
    for token in range(1, 5):
        left = operator.step(states[:, token - 1, ..., None], token)[..., 0]
        written = operator.write[:, token] * v[:, token]
        assert relative_error(left + written, states[:, token]) <= 1e-13


def test_single_precision_and_a_norm_around_it() -> None:
    operator = drawn(30)
    single = FeedbackRecurrence(*(x.float() for x in operator.tensors().values()))
    shape = Shape(*operator.shape)
    chain = Chain(HeadCentering(shape, single.decay), single)
    v = torch.randn(shape, dtype=torch.float64)
    wanted = by_token(operator, v)
    wanted = wanted - wanted.mean(-1, keepdim=True)
    assert chain.apply(v.float()).dtype == torch.float32
    assert relative_error(chain.apply(v.float()).double(), wanted) <= 1e-5


def test_some_heads_are_not_centred() -> None:
    shape = Shape(2, 3, 4, 5)
    chosen = torch.tensor([1.0, 0.0, 0.0, 1.0])
    centering = HeadCentering(shape, torch.zeros(()), centred=chosen)
    x = torch.randn(shape)
    found = centering.apply(x)
    assert torch.equal(found[:, :, 1:3], x[:, :, 1:3])
    assert torch.allclose(found[:, :, ::3].mean(-1), torch.zeros(2, 3, 2), atol=1e-6)
    assert torch.allclose(centering.select([2, 3]).apply(x[:, :, 2:]), found[:, :, 2:])
    own = centering.per_channel().tensors()["weight"].expand(1, 1, 4, 1).flatten()
    assert torch.allclose(own, torch.tensor([0.8, 1.0, 1.0, 0.8]))
