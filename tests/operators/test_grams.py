"""Products of queries and keys with decays between them, against sums of logarithms."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators.kernels.chunk_tree import decay_matrices
from captum_ssm.operators.kernels.within_chunk import decayed, decayed_grams

EXACT = 1e-12


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def log_decays(*size: int) -> Tensor:
    """Some are minus infinity."""
    return -randn(*size).exp().masked_fill(torch.rand(*size) < 0.1, torch.inf)


def between(logs: Tensor, i: int, j: int) -> Tensor:
    """The product of the decays of tokens j+1..i of (..., T, N)."""
    return logs[..., j + 1 : i + 1, :].sum(-2).exp()


def gram(logs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    tokens = logs.shape[-2]
    out = torch.zeros(*rows.shape[:-1], tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            product = rows[..., i, :] * between(logs, i, j) * columns[..., j, :]
            out[..., i, j] = product.sum(-1)
    return out


@pytest.mark.parametrize("kinds", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 33, 64])
def test_grams(tokens: int, kinds: int) -> None:
    logs, columns = log_decays(2, 3, tokens, 5), randn(2, 3, tokens, 5)
    rows = [randn(2, 3, tokens, 5) for _ in range(kinds)]
    decay = logs.exp()
    kept = [x.clone() for x in (decay, columns, *rows)]
    grams, reads, writes, total = decayed_grams(decay, rows, columns)
    assert len(grams) == len(reads) == kinds
    before = torch.stack([between(logs, i, -1) for i in range(tokens)], -2)
    after = torch.stack([between(logs, tokens - 1, j) for j in range(tokens)], -2)
    for matrix, read, row in zip(grams, reads, rows, strict=True):
        assert relative_error(matrix, gram(logs, row, columns)) <= EXACT
        assert relative_error(read, row * before) <= EXACT
    assert relative_error(writes, columns * after) <= EXACT
    assert relative_error(total, before[..., -1:, :]) <= EXACT
    for x, before in zip((decay, columns, *rows), kept, strict=True):
        assert torch.equal(x, before), "a factor was overwritten"


@pytest.mark.parametrize("tokens", [1, 2, 9, 64])
def test_one_decay_for_all_key_channels(tokens: int) -> None:
    logs, rows, columns = log_decays(2, 3, tokens, 1), *randn(2, 2, 3, tokens, 4)
    spread = logs.expand(-1, -1, -1, 4)
    alike, each = decayed(logs, [rows], columns), decayed(spread, [rows], columns)
    assert relative_error(alike.grams[0], gram(spread, rows, columns)) <= EXACT
    assert relative_error(alike.grams[0], each.grams[0]) <= EXACT
    assert relative_error(alike.reads[0], each.reads[0]) <= EXACT
    assert relative_error(alike.writes, each.writes) <= EXACT
    assert relative_error(alike.total.expand_as(each.total), each.total) <= EXACT


@pytest.mark.parametrize("tokens", [1, 5, 64, 100, 130])
def test_decay_matrices(tokens: int) -> None:
    logs = log_decays(2, 3, tokens, 1)  # (B, H, L, 1)
    one = torch.ones_like(logs)
    found = decay_matrices(logs.squeeze(-1).transpose(1, 2).exp())
    assert relative_error(found, gram(logs, one, one)) <= EXACT


def test_products_of_many_weak_decays_keep_their_precision() -> None:
    logs = torch.full((1, 64, 1), -1e-3) * torch.rand(1, 64, 1)
    one = torch.ones_like(logs)
    found = decayed_grams(logs.exp(), [one], one)
    assert relative_error(found.grams[0], gram(logs.double(), one.double(), one.double())) <= 2e-6
