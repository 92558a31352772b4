"""Inverses of triangular matrices against those of any matrix."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error

from captum_ssm.operators.kernels.ut_transform import unit_lower_inverse


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3)], ids=["one", "three", "stacked"])
@pytest.mark.parametrize("side", [1, 2, 3, 7, 8, 9, 10, 16, 18, 31, 32, 36, 64])
def test_any_side(side: int, batch: tuple[int, ...]) -> None:
    below = torch.randn(*batch, side, side, dtype=torch.float64).tril(-1) / side**0.5
    wanted = torch.linalg.inv(below + torch.eye(side))
    assert relative_error(unit_lower_inverse(below), wanted) <= 1e-12


def test_reads_what_is_below_the_diagonal() -> None:
    below = torch.randn(2, 32, 32, dtype=torch.float64).tril(-1) / 8
    rest = torch.full_like(below, torch.nan).triu()
    assert torch.equal(unit_lower_inverse(below + rest), unit_lower_inverse(below))


def test_leaves_its_argument_as_it_is() -> None:
    below = torch.randn(2, 32, 32).tril(-1) / 8
    given = below.clone()
    unit_lower_inverse(given)
    assert torch.equal(given, below)
