"""Step sizes from 1e-8 to 20, beside decays that underflow in one step or never fade."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error, scan_matrices
from torch import Tensor
from zoo.extreme import FAMILIES, METHODS, in_double, language_model, token_ids
from zoo.extreme import with_extreme_steps as extreme

from captum_ssm import trace
from captum_ssm.operators import ScalarDecayHeads, SelectiveScan

#: Of a single draw in float32.
LIMIT = 1e-5


def steps(*shape: int) -> Tensor:
    """From 1e-8 to 20, evenly over the powers of ten."""
    return 10 ** (torch.rand(shape).double() * 9.3 - 8)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_float32_is_float64(method: str, family: str) -> None:
    model, ids = extreme(language_model(family)), token_ids()
    found, wanted = METHODS[method](model, ids), METHODS[method](in_double(model), ids)
    assert found.dtype == torch.float32 and wanted.dtype == torch.float64
    assert torch.isfinite(wanted).all()
    assert bool(wanted.any())
    assert relative_error(found, wanted) <= LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_are_their_modules(family: str) -> None:
    model = extreme(language_model(family))
    with trace(model) as record:
        model(token_ids())
    assert len(record.layers) == 2
    assert max(layer.reconstruction_error() for layer in record.layers) <= LIMIT


@pytest.mark.parametrize("tokens", [1, 70])
def test_selective_scan(tokens: int) -> None:
    dt, rates = steps(2, tokens, 5), -(10 ** (6 * torch.rand(5, 3).double() - 3))
    b, c = torch.randn(2, tokens, 3).double(), torch.randn(2, tokens, 3).double()
    wanted = scan_matrices(dt, rates, b, c)  # (B, C, L, L)
    scan = SelectiveScan(dt.float(), rates.float(), b.float(), c.float())
    assert relative_error(scan.dense(None), wanted) <= LIMIT
    assert relative_error(scan.dense(), wanted.mean(1)) <= LIMIT
    row = torch.randn(2, tokens)
    carried = torch.einsum("bi,bcij->bj", row.double(), wanted) / 5
    assert relative_error(scan.mean_rmatvec(row), carried) <= LIMIT


@pytest.mark.parametrize("tokens", [1, 70])
def test_decaying_heads(tokens: int) -> None:
    dt, rates = steps(2, tokens, 4), -(10 ** (6 * torch.rand(4).double() - 3))
    query, key = torch.randn(2, tokens, 1, 3).double(), torch.randn(2, tokens, 1, 3).double()
    wanted = torch.zeros(2, 4, tokens, tokens).double()
    for i in range(tokens):
        for j in range(i + 1):
            decay = (rates * dt[:, j + 1 : i + 1].sum(1)).exp()  # (B, H)
            score = (query[:, i, 0] * key[:, j, 0]).sum(-1, keepdim=True)
            wanted[:, :, i, j] = score * decay * dt[:, j]
    heads = ScalarDecayHeads(
        query.float(), key.float(), (rates * dt).float(), dt.float(), per_head=2
    )
    assert relative_error(heads.dense("heads"), wanted) <= LIMIT
    row = torch.randn(2, tokens)
    carried = torch.einsum("bi,bhij->bj", row.double(), wanted) / 4
    assert relative_error(heads.mean_rmatvec(row), carried) <= LIMIT
