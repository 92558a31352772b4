"""Any composition of operators is the product and sum of its parts' matrices."""

from __future__ import annotations

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
    delta_rule,
    diagonal,
    feedback,
    permute,
    total,
    windowed,
)
from operators.small_blocks import blocks
from oracles import relative_error

from captum_ssm.operators import Chain, Permute, Shape


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
@settings(max_examples=4, phases=(Phase.explicit, Phase.generate))
@given(st.data(), st.integers(1, 12), st.integers(1, 2), st.integers(0, 2**31), st.booleans())
def test_any_composition(
    data: st.DataObject, tokens: int, per_head: int, seed: int, small: bool
) -> None:
    kind = data.draw(composed(trees(per_head)))
    torch.manual_seed(seed)
    case = kind(Shape(2, tokens, 4, per_head))
    with blocks(small):
        case.check(seed=seed)


def test_tokens_are_reordered_last() -> None:
    """No random composition is sure to begin with a reordering that is not its own inverse."""
    torch.manual_seed(1)
    chain(permute, delta_rule(), diagonal())(Shape(2, 7, 4, 2)).check()


def test_a_reordering_times_a_matrix() -> None:
    order, matrix = torch.tensor([2, 0, 3, 1]), torch.randn(5, 4, 4)
    operator = Permute(order, Shape(1, 4, 1, 1))
    whole = torch.eye(4)[order]
    assert torch.equal(operator.rows_of(matrix), whole @ matrix)
    assert torch.equal(operator.columns_of(matrix), matrix @ whole)


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
