"""Every tensor an operator makes is on the device of its coefficients, in their dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import chunked_kinds

from captum_ssm.operators import (
    Chain,
    DenseHeads,
    ElementwiseRecurrence,
    FeedbackRecurrence,
    Operator,
    Permute,
)


@contextmanager
def elsewhere_by_default() -> Iterator[None]:
    """Tensors of which neither is said are half precision on a device that holds no numbers."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(kept)


def answers(operator: Operator, v: Tensor) -> Iterator[Tensor]:
    """What every method of the contract says."""
    tokens = operator.shape.tokens
    yield operator.apply(v)
    yield operator.transpose(v)
    yield operator.affine(v)
    for reduce in ("mean", "max", None, "heads"):
        yield operator.dense(reduce)
        yield operator.rows([tokens - 1, 0], reduce)
    yield operator.dense(heads=[1, -1])
    yield operator.contract(v, v)
    yield operator.contract_heads(v, v)
    for rows in (range(1, tokens), range(tokens - 2, tokens)):
        yield operator.strip(v, v, rows).whole(tokens)
        yield operator.reduced_strip(rows).whole(tokens)
        band = {-1: v, 0: v, 2: v}
        yield operator.strip_of_product(v, band, rows).whole(tokens)
    yield operator.heads_of_product(v, {0: v, 3: v})
    x = v[..., 0, 0]
    yield operator.mean_matvec(x)
    yield operator.mean_rmatvec(x)


def check(operator: Operator) -> None:
    v = torch.randn(operator.shape, dtype=torch.float64)
    wanted = list(answers(operator, v))
    with elsewhere_by_default():
        found = list(answers(operator, v))
    for one, other in zip(found, wanted, strict=True):
        assert (one.device, one.dtype) == (other.device, other.dtype)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_nothing_is_made_elsewhere(build: Callable[[int], Any]) -> None:
    check(build(6).operator)


@pytest.mark.parametrize("kind", chunked_kinds.KINDS)
def test_nothing_of_heads_is_made_elsewhere(kind: str) -> None:
    make, _ = chunked_kinds.KINDS[kind]
    check(make(6))


def test_nothing_of_other_kinds_is_made_elsewhere() -> None:
    matrices = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    decay = torch.rand(2, 6, 3, dtype=torch.float64)
    for operator in (DenseHeads(matrices, 2), ElementwiseRecurrence(decay)):
        check(operator)
        check(Chain(operator, Permute(torch.randperm(6), operator.shape)))
    factors = torch.rand(3, 2, 6, 3, 4, dtype=torch.float64)
    check(FeedbackRecurrence(*factors, torch.randn(3, 4, 4, dtype=torch.float64)).per_channel())
