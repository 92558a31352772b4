"""Positions counted from either end, and rows made a few at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from captum_ssm.errors import QueryError
from captum_ssm.operators.kernels import rows
from captum_ssm.operators.kernels.rows import in_stacks, per_example, unit_vectors

CPU = torch.device("cpu")


def test_both_ends_count() -> None:
    found = per_example([-4, -1, 0, 3], 2, 4, CPU)
    assert found.tolist() == [[0, 3, 0, 3]] * 2
    each = per_example(torch.tensor([[-4, 3], [-2, 0]]), 2, 4, CPU)
    assert each.tolist() == [[0, 3], [2, 0]]


@pytest.mark.parametrize("asked", [[4], [0, -5], [[0, 1], [1, 4]], [[0], [-5]], []])
def test_positions_outside_are_named(make: Any, asked: list[Any]) -> None:
    given = torch.tensor(asked) if asked and isinstance(asked[0], list) else asked
    with pytest.raises(QueryError, match=r"positions must lie in \[-4, 4\)") as caught:
        per_example(given, 2, 4, CPU)
    assert str(given) in str(caught.value)
    with pytest.raises(QueryError):
        make.scan(4).operator.rows(given)


def test_unit_vectors_per_example() -> None:
    like = torch.ones((), dtype=torch.float16)
    common = unit_vectors(range(1, 3), 4, like)
    assert (common.shape, common.dtype) == ((2, 1, 4, 1, 1), torch.float16)
    assert common.flatten(1).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    each = unit_vectors(torch.tensor([[3, 0]]), 4, like)
    assert each.flatten(2).tolist() == [[[0, 0, 0, 1], [1, 0, 0, 0]]]


@pytest.mark.parametrize("elements", [0, 1, 3, 10, 11, 1000])
def test_stacks_hold_what_they_may(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_STACK_ELEMENTS", 10)
    parts = list(in_stacks(range(3, 20), elements, torch.device("cpu")))
    assert [row for part in parts for row in part] == list(range(3, 20))
    most = max(1, 10 // max(1, elements))
    assert max(map(len, parts)) == min(most, 17)
    assert len(parts) == -(-17 // most)
