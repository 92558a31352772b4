"""Matrices made channel by channel are those made row by row, of every kind of operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import Operator, reduction
from captum_ssm.operators.reduction import goes_by_channel

REDUCTIONS = ["max", "min", "product", None]


@pytest.mark.parametrize("elements", [1, 2 * 81 * 2, 2**24])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_channels_are_rows(
    build: Any, reduce: str | None, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = build(9).operator
    monkeypatch.setattr(reduction, "_ELEMENTS", elements)
    found = reduction.by_channel(operator, reduce)
    wanted = operator.rows(range(9), reduce)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@pytest.mark.parametrize("heads", [1, 2, 100])
def test_heads_are_formed_some_at_a_time(
    build: Any, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build(9)
    batch, tokens, count, per_head = case.shape
    monkeypatch.setattr(reduction, "_ELEMENTS", heads * batch * tokens**2)
    formed, made = [], type(case.operator).contract_heads

    def few(self: Operator, *factors: Tensor) -> Tensor:
        found = made(self, *factors)
        formed.append(found.shape[1])
        return found

    with monkeypatch.context() as patched:
        patched.setattr(type(case.operator), "contract_heads", few)
        found = case.operator.dense("heads")
    assert max(formed) <= heads and sum(formed) >= count
    wanted = case.matrices.view(batch, count, per_head, tokens, tokens).mean(2)
    assert relative_error(found, wanted) <= 1e-12


def test_who_goes_by_channel(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = build(7).operator
    quick = any(leaf.quick_heads for leaf in operator.leaves())
    for reduce in REDUCTIONS:
        assert goes_by_channel(operator, reduce) == quick
    for reduce in ("mean", "heads", torch.amax):
        assert not goes_by_channel(operator, reduce)
    if quick:
        wanted = operator.rows(range(7), "min")
        monkeypatch.setattr(Operator, "rows", None)  # not called
        assert relative_error(operator.dense("min"), wanted) <= 1e-12
