"""Any composition of operators is the product and sum of its parts' matrices."""

from __future__ import annotations

import oracles.kernels
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from operators.kinds import (
    LEAVES,
    SINGLE,
    Kind,
    beside,
    centering,
    chain,
    feedback,
    randn,
    total,
    windowed,
)
from operators.small_blocks import blocks
from oracles import relative_error
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


def trees(per_head: int) -> st.SearchStrategy[Kind]:
    """An operator of any kind, or a composition of some."""
    # a softmax of scores is no recurrence, and the slowest of all to write down
    any_heads = [kind for name, kind in LEAVES.items() if not name.startswith("scored")]
    leaves = st.sampled_from([*SINGLE.values(), *any_heads] if per_head == 1 else any_heads)
    return st.recursive(leaves, composed, max_leaves=5)


def composed(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        some.map(lambda kinds: chain(*kinds)),
        some.map(lambda kinds: total(*kinds)),
        st.builds(beside, inner, inner),
        st.builds(windowed, inner, st.integers(0, 1)),
    )


@pytest.mark.slow
@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))
@given(st.data(), st.integers(1, 12), st.integers(1, 2), st.integers(0, 2**31), st.booleans())
def test_any_composition(
    data: st.DataObject, tokens: int, per_head: int, seed: int, small: bool
) -> None:
    kind = data.draw(composed(trees(per_head)))
    torch.manual_seed(seed)
    case = kind(Shape(2, tokens, 4, per_head))
    with blocks(small):
        case.check(seed=seed)


def test_a_product_of_operators_that_mix_channels() -> None:
    """As sLSTM has it: its outputs are fed back, and centered."""
    shape = Shape(2, 6, 4, 3)
    first, last = feedback(shape), centering(shape)
    v, u = torch.randn(2, *shape, dtype=torch.float64)
    operator = Chain(last.operator, first.operator)
    matrices = torch.einsum("bhpqij,bhqrjk->bhprik", last.exact(), first.exact())
    wanted = torch.einsum("bhpqij,bjhq->bihp", matrices, v)
    adjoint = torch.einsum("bhpqij,bihp->bjhq", matrices, u)
    assert relative_error(operator.apply(v), wanted) <= 1e-12
    assert relative_error(operator.transpose(u), adjoint) <= 1e-12
    shares = [case.exact().diagonal(0, 2, 3).movedim(-1, 2).flatten(1, 2) for case in (last, first)]
    assert relative_error(operator.per_channel().dense(None), shares[0] @ shares[1]) <= 1e-12


def test_a_part_between_others_is_reached_through_all_that_is_around_it() -> None:
    """Chains, sums, operators side by side, windows and other orders of the tokens."""
    tokens = 6
    shape, one = Shape(2, tokens, 4, 1), Shape(4, 3, 4, 1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    windows = Windows(torch.tensor([[4, 0, 2], [1, 5, 3]]))
    leaves = [randn(2, tokens, 4, 1).requires_grad_() for _ in range(3)]
    inside = randn(*one).requires_grad_()
    left, right = (x.requires_grad_() for x in (randn(2, tokens, 1), randn(2, tokens, 3)))
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
        back = torch.empty(2, tokens, 4, 1, dtype=torch.float64)
        back[:, [4, 0, 2, 1, 5, 3]] = x.view(2, tokens, 4, 1)
        decay = torch.cat([left, right], 2)
        x = oracles.kernels.recurrence(decay, back[None, ..., 0], False)[0, ..., None]
        return leaves[0] * ((leaves[1] * x)[:, order] + x)

    v, seed = randn(2, tokens, 4, 1).requires_grad_(), randn(2, tokens, 4, 1)
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
