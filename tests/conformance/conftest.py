"""The methods under test, and models that are watched while Captum's tools run them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import matplotlib
import pytest
import torch
from torch import nn

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
)


class CentredFlow(LatimFlow):
    """LatimFlow by the rule that looks at what mattered."""

    name = "LatimFlow, centred"
    default_rule = "centred"


#: Add a new method here, and every tool below is tried on it.
METHODS = [
    ImplicitAttention,
    ImplicitAttentionRollout,
    MambaAttribution,
    TransformerAttribution,
    LatimNorm,
    LatimALTI,
    LatimFlow,
    CentredFlow,
    MambaLRP,
]


def _chosen() -> list[Any]:
    """All methods, or the one that CAPTUM_SSM_METHOD names as module:Class."""
    module, _, name = os.environ.get("CAPTUM_SSM_METHOD", "").partition(":")
    return [getattr(import_module(module), name)] if module else METHODS


CHOSEN = _chosen()


@pytest.fixture
def methods() -> list[Any]:
    return list(dict.fromkeys([*METHODS, *CHOSEN]))


@pytest.fixture(params=CHOSEN)
def method(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def without_screen() -> Iterator[None]:
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(backend)


@pytest.fixture
def watched() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Hands a model on, and in the end finds it as it was: parameters, gradients, flags, hooks."""
    seen: list[tuple[nn.Module, Any]] = []

    def watch(model: nn.Module) -> nn.Module:
        seen.append((model, _state(model)))
        return model

    yield watch
    for model, before in seen:
        after = _state(model)
        assert before.keys() == after.keys()
        for name, value in before.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(value, after[name]), name
    assert torch.is_grad_enabled()


def _state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        state[f"{name}: value"] = tensor.detach().clone()
        state[f"{name}: grad"] = tensor.grad
        state[f"{name}: requires_grad"] = tensor.requires_grad
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        state[f"{name}: module"] = (type(module), module.training, [list(h) for h in hooks])
    return state
