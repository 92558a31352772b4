"""Where gradients are recorded, and where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracles import relative_error

from captum_ssm.operators.kernels.arithmetic import linear_map


def test_nothing_is_recorded_where_gradients_are_off(build: Callable[[int], Any]) -> None:
    operator = build(5).operator
    v = torch.randn(operator.shape, dtype=torch.float64, requires_grad=True)
    x = v.detach()[..., 0, 0].clone().requires_grad_()
    with torch.no_grad():
        found = [operator.apply(v), operator.transpose(v)]
        found += [operator.mean_matvec(x), operator.mean_rmatvec(x)]
    assert not any(y.requires_grad for y in found)


def test_a_map_is_run_unrecorded_and_derived_by_its_adjoint() -> None:
    matrix = torch.randn(4, 3, dtype=torch.float64)
    u, x = torch.randn(4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    modes = []

    def forward(v: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return matrix @ v

    def adjoint(v: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return matrix.T @ v

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(linear_map(x, forward, adjoint), x, u)
    assert relative_error(gradient, matrix.T @ u) <= 1e-15
    linear_map(x.detach(), forward, adjoint)
    assert modes == [False, False, False]
