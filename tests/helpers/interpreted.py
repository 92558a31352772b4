"""Operators held to what real kernels return, in float32 and in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn

from captum_ssm import LatimFlow, trace
from captum_ssm.tracing import Layer
from helpers import own_code

#: Of operators in float32, for any draw; typical is 3e-7.
FLOAT32 = 1e-5
#: What bfloat16 itself may cost a module: some roundings, each of 2e-3.
BFLOAT16 = 6e-2


@torch.no_grad()
def check(
    model: nn.Module, *args: Any, bound: float = FLOAT32, twins: bool = True, **kwargs: Any
) -> list[Layer]:
    """The operators of a run are what its modules returned.

    In bfloat16 they are what a float32 copy of the module returns at the same input, by the same
    kernels, and the module itself differs from that by its own rounding.  Kernels that refuse
    float32 have no such twins: then operators are the modules but for that rounding.
    """
    with trace(model) as record:
        model(*args, **kwargs)
    assert record.layers
    for layer in record.layers:
        found, real = layer.linear.output(), layer.output
        if real.dtype == torch.float32:
            assert relative_error(found, real) <= bound, layer.name
            continue
        if not twins:
            assert relative_error(found, real.float()) <= BFLOAT16, layer.name
            continue
        twin = copy.deepcopy(layer.mixer.module).float()
        precise = twin(*widened(layer.call.args), **widened(dict(layer.call.kwargs)))
        precise = precise if isinstance(precise, Tensor) else precise[0]
        assert relative_error(found, precise) <= bound, layer.name
        assert 1e-5 < relative_error(real.float(), precise) <= BFLOAT16, layer.name
    return list(record.layers)


def widened(value: Any) -> Any:
    """The arguments of a call with their floating tensors in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(widened, value))
    return {k: widened(v) for k, v in value.items()} if isinstance(value, dict) else value


def check_read(
    model: nn.Module, ids: Tensor, rule: str, patch: pytest.MonkeyPatch, bound: float = FLOAT32
) -> None:
    """LatimFlow reads the model's kernels, and returns what it does by operators."""
    read = own_code.recorded(patch)
    explain = LatimFlow(model, rule=rule)  # type: ignore[arg-type]
    found = explain.attribute(ids, (-1, 3))
    assert read and all(read), "an adapter was asked"
    with own_code.by_adapters():
        error = relative_error(found, explain.attribute(ids, (-1, 3)))
    assert error <= bound, error
