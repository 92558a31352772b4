"""Recurrences with one decay per channel: runs of tokens side by side, streams, WKV."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error, times
from torch import Tensor

from captum_ssm.operators import WKV, ElementwiseRecurrence
from captum_ssm.operators.recurrences import elementwise


def drawn(tokens: int, heads: int = 4) -> tuple[ElementwiseRecurrence, Tensor]:
    """A recurrence with resets, and its matrices (B, H, L, L)."""
    decay = torch.rand(2, tokens, heads, dtype=torch.float64)
    decay = decay.where(torch.rand_like(decay) > 0.1, 0)
    matrices = torch.zeros(2, heads, tokens, tokens, dtype=torch.float64)
    for j in range(tokens):
        product = torch.ones(2, heads, dtype=torch.float64)
        for i in range(j, tokens):
            product = product * decay[:, i] if i > j else product
            matrices[..., i, j] = product
    return ElementwiseRecurrence(decay), matrices


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 65])
@pytest.mark.parametrize("held", [512, 26, 16, 7, 2, 1])
def test_any_number_of_tokens_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tokens: int, held: int
) -> None:
    monkeypatch.setattr(elementwise, "_TOKENS", held)
    operator, wanted = drawn(tokens)
    for lead in ((), (3,), (2, 3)):
        v = torch.randn(*lead, *operator.shape, dtype=torch.float64)
        assert relative_error(operator.apply(v), times(wanted, v)) <= 1e-12
        assert relative_error(operator.transpose(v), times(wanted.mT, v)) <= 1e-12


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_products_with_the_mean_matrix(tokens: int) -> None:
    operator, wanted = drawn(tokens)
    x = torch.randn(2, tokens, dtype=torch.float64)
    mean = wanted.mean(1)
    assert relative_error(operator.mean_matvec(x), torch.einsum("bij,bj->bi", mean, x)) <= 1e-12
    assert relative_error(operator.mean_rmatvec(x), torch.einsum("bi,bij->bj", x, mean)) <= 1e-12


@pytest.mark.parametrize("elements", [1, 100, 10**9])
def test_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(elementwise, "TREE_ELEMENTS", elements)
    monkeypatch.setattr(elementwise, "TREE_LEAST", 1)
    operator, wanted = drawn(21)
    assert relative_error(operator.dense(), wanted.mean(1)) <= 1e-12
    left, right = torch.randn(2, *operator.shape, dtype=torch.float64)
    contracted = torch.einsum("bic,bcij,bjc->bij", left[..., 0], wanted, right[..., 0])
    assert relative_error(operator.contract(left, right), contracted) <= 1e-12


@pytest.mark.parametrize("tokens", [1, 11, 70])
@pytest.mark.parametrize("scale", [1.0, 200.0, 1e4])
def test_wkv_is_a_softmax(tokens: int, scale: float) -> None:
    """Keys of any size: the weights of a row are those of its softmax."""
    heads = 3
    key = scale * torch.randn(2, tokens, heads, dtype=torch.float64)
    log_decay, bonus = -torch.rand(heads).double() - 0.1, torch.randn(heads).double()
    i, j = torch.arange(tokens)[:, None, None], torch.arange(tokens)[:, None]
    scores = (i - 1 - j) * log_decay + key[:, None]  # (B, i, j, H)
    scores = scores.where(i != j, bonus + key[:, None]).where(j <= i, -torch.inf)
    wanted = scores.softmax(2).permute(0, 3, 1, 2)
    # exponents are differences of numbers of the size of the keys, summed in some twenty steps
    rounding = max(1e-12, 40 * torch.finfo(torch.float64).eps * float(key.abs().max()))
    operator = WKV(key, log_decay, bonus)
    assert relative_error(operator.dense(None), wanted) <= rounding
    assert relative_error(operator.dense(), wanted.mean(1)) <= rounding


def test_wkv_of_live_keys_is_frozen() -> None:
    key = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    operator = WKV(key, -torch.rand(3).double(), torch.randn(3).double())
    assert not any(x.requires_grad for leaf in operator.leaves() for x in leaf.tensors().values())
    assert not operator.dense().requires_grad
