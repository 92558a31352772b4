"""Any composition of operators is the product and sum of its matrices."""

from __future__ import annotations

from typing import Any

import oracles
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import times
from torch import Tensor

from captum_ssm.operators import Chain, Diagonal, Operator, SelectiveScan, Shape, ShortConv, Sum

LEAVES = st.one_of(
    st.just(("diagonal",)),
    st.just(("scan",)),
    st.tuples(st.just("conv"), st.lists(st.integers(-3, 4), min_size=1, max_size=3, unique=True)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("chain"), st.lists(inner, min_size=1, max_size=4)),
        st.tuples(st.just("sum"), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


Grown = tuple[Operator, Tensor, Tensor, Tensor]


def grow(tree: Any, shape: Shape, random: torch.Generator) -> Grown:
    """The operator, its matrices, the same with every factor's absolute value, and the offset."""

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    nothing = torch.zeros(shape, dtype=torch.float64)
    if tree[0] == "diagonal":
        weight = randn(*shape)
        alpha = oracles.diagonal_matrices(weight, shape)
        return Diagonal(weight, shape), alpha, alpha.abs(), nothing
    if tree[0] == "conv":
        weight, bias = randn(shape.heads, 1, len(tree[1])), randn(*shape)
        alpha = oracles.conv_matrices(weight, tree[1], shape)
        return ShortConv(weight, shape, bias, tree[1]), alpha, alpha.abs(), bias
    if tree[0] == "scan":
        dt, a = randn(*shape[:3]).exp(), -randn(shape.heads, 2).exp()
        b, c = randn(*shape[:2], 2), randn(*shape[:2], 2)
        bound = oracles.scan_matrices(dt, a, b.abs(), c.abs())
        return SelectiveScan(dt, a, b, c), oracles.scan_matrices(dt, a, b, c), bound, nothing
    parts = [grow(part, shape, random) for part in tree[1]]
    operators = [part[0] for part in parts]
    _, alpha, bound, offset = parts[-1]
    for _, matrix, matrix_bound, term in parts[-2::-1]:
        if tree[0] == "sum":
            alpha, bound, offset = alpha + matrix, bound + matrix_bound, offset + term
        else:
            alpha, bound = matrix @ alpha, matrix_bound @ bound
            offset = times(matrix, offset) + term
    return (Sum if tree[0] == "sum" else Chain)(*operators), alpha, bound, offset


@settings(max_examples=60)
@given(tree=TREES, tokens=st.integers(1, 20), batch=st.integers(1, 2), draw=st.integers(0, 2**31))
def test_any_composition(tree: Any, tokens: int, batch: int, draw: int) -> None:
    random = torch.Generator().manual_seed(draw)
    shape = Shape(batch, tokens, 3, 1)
    operator, alpha, bound, offset = grow(tree, shape, random)
    v = torch.randn(*shape, generator=random, dtype=torch.float64)
    # what cancels is measured against the size of its terms
    scale = (
        1e-30 + float(bound.sum(-1).max()) * (1 + float(v.abs().max())) + float(offset.abs().max())
    )

    def close(found: Tensor, wanted: Tensor) -> bool:
        assert found.shape == wanted.shape
        return float((found - wanted).abs().max()) <= 1e-11 * scale

    assert close(operator.affine(v), times(alpha, v) + offset)
    assert close(operator.transpose(v), times(alpha.mT, v))
    assert close(operator.dense(), alpha.mean(1))
    assert close(operator.rows([tokens - 1, 0], None), alpha[:, :, [tokens - 1, 0]])
    right = v.roll(1, 0).cos()
    wanted = torch.einsum("bicx,bcij,bjcx->bij", v, alpha, right)
    assert close(operator.contract(v, right), wanted)
    if operator.offset() is None:
        assert not offset.any()
