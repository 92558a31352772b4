"""Gradients of coefficients, through products, sums, windows and other orders of the tokens."""

from __future__ import annotations

import oracles.kernels
import torch
from torch import Tensor

from captum_ssm.operators import (
    Chain,
    Diagonal,
    DirectSum,
    ElementwiseRecurrence,
    Permute,
    Shape,
    Sum,
)
from captum_ssm.operators.readings.coefficients import Gradients, live_coefficients, vjp
from captum_ssm.operators.reorder import Windowed, Windows

BATCH, HEADS = 2, 4


def randn(*size: int) -> Tensor:
    return torch.randn(BATCH, *size, dtype=torch.float64)


def test_a_part_between_others_is_reached_through_all_that_is_around_it() -> None:
    """Chains, sums, operators side by side, windows and other orders of the tokens."""
    tokens = 6
    shape, one = Shape(BATCH, tokens, HEADS, 1), Shape(2 * BATCH, 3, HEADS, 1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    windows = Windows(torch.tensor([[4, 0, 2], [1, 5, 3]]))
    leaves = [randn(tokens, HEADS, 1).requires_grad_() for _ in range(3)]
    inside = torch.randn(one, dtype=torch.float64, requires_grad=True)
    left, right = (x.requires_grad_() for x in (randn(tokens, 1), randn(tokens, HEADS - 1)))
    gates = [Diagonal(x, shape, "gate") for x in leaves]
    operator = Chain(
        gates[0],
        Sum(Chain(Permute(order, shape), gates[1]), Diagonal(torch.ones(1, 1, 1, 1), shape)),
        DirectSum(ElementwiseRecurrence(left), ElementwiseRecurrence(right)),
        Windowed(Diagonal(inside, one, "gate"), windows),
        gates[2],
    )

    def plain(v: Tensor) -> Tensor:
        x = (leaves[2] * v)[:, [[4, 0, 2], [1, 5, 3]]].flatten(0, 1) * inside
        back = torch.empty(BATCH, tokens, HEADS, 1, dtype=torch.float64)
        back[:, [4, 0, 2, 1, 5, 3]] = x.view(BATCH, tokens, HEADS, 1)
        decay = torch.cat([left, right], 2)
        x = oracles.kernels.recurrence(decay, back[None, ..., 0], False)[0, ..., None]
        return leaves[0] * ((leaves[1] * x)[:, order] + x)

    v, seed = randn(tokens, HEADS, 1).requires_grad_(), randn(tokens, HEADS, 1)
    torch.testing.assert_close(operator.apply(v.detach()), plain(v).detach())
    found: Gradients = {}
    out, back = vjp(operator, v.detach()[None], {}, torch.ones(1, 1, 1, 1, 1))
    of_values = back(seed[None], found)[0]
    torch.testing.assert_close(out[0], plain(v).detach())
    live = live_coefficients(operator)
    told = [leaves[0], leaves[1], left, right, inside, leaves[2]]
    assert all(x is y for x, y in zip(live.values(), told, strict=True))
    wanted = torch.autograd.grad(plain(v), [v, *live.values()], seed)
    torch.testing.assert_close(of_values, wanted[0])
    for (leaf, name), gradient in zip(live, wanted[1:], strict=True):
        torch.testing.assert_close(found[leaf][name], gradient)
