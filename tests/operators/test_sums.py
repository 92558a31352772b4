"""Sums of few operators, down to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracles import relative_error

from captum_ssm.operators import Sum, generic


def test_a_sum_of_one_is_that_one(build: Callable[[int], Any]) -> None:
    operator = build(6).operator
    alone = Sum(operator)
    v = torch.randn(operator.shape, dtype=torch.float64)
    assert alone.shape == operator.shape
    assert relative_error(alone.apply(v), operator.apply(v)) <= 1e-12
    assert relative_error(alone.transpose(v), operator.transpose(v)) <= 1e-12
    assert relative_error(alone.contract(v, v), generic.contract(operator, v, v)) <= 1e-12
    assert relative_error(alone.dense("heads"), operator.dense("heads")) <= 1e-12
    assert (alone.offset() is None) == (operator.offset() is None)
