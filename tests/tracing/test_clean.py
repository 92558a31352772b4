"""A trace leaves the model, its hooks and the global state as they were, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.mamba import transformers_model

from captum_ssm import trace

GRAPHS = ["none", "tail", "outputs", "all"]


@pytest.fixture
def model() -> Any:
    return transformers_model("mamba", num_hidden_layers=3)


def ids() -> Tensor:
    return torch.randint(19, (2, 5))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("training", [False, True])
def test_after_success(model: Any, snapshot: Any, graph: Any, training: bool) -> None:
    model.train(training)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    tokens = ids()
    before = snapshot(model)
    with trace(model, graph=graph) as t:
        model(tokens)
    before.check()
    for layer in t.layers:
        layer.verify()
        layer.operator.dense()
        layer.operator.rows([0], None)
    before.check()


@pytest.mark.parametrize("graph", GRAPHS)
def test_hooks_are_there_in_between(model: Any, snapshot: Any, graph: Any) -> None:
    """Or the other tests would prove nothing."""
    before = snapshot(model)
    with trace(model, graph=graph), pytest.raises(AssertionError):
        before.check()
    before.check()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("graph", GRAPHS)
def test_grad_mode_is_kept(model: Any, graph: Any, mode: Callable[[], Any]) -> None:
    with mode():
        enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with trace(model, graph=graph if mode is not torch.inference_mode else "none") as t:
            model(ids())
        assert torch.is_grad_enabled() == enabled
        assert torch.is_inference_mode_enabled() == inference
        t.layers[0].verify()
        assert torch.is_grad_enabled() == enabled
        assert torch.is_inference_mode_enabled() == inference
    assert torch.is_grad_enabled()


def test_after_a_refusal(model: Any, snapshot: Any) -> None:
    model.backbone.layers[1].mixer = nn.LSTM(5, 5)
    tokens, before = ids(), snapshot(model)
    with pytest.raises(TypeError), trace(model):
        model(tokens)
    before.check()
    with pytest.raises(ValueError), trace(model, layers=["nowhere"]):
        pass
    before.check()


@pytest.mark.parametrize("graph", GRAPHS)
def test_nested_and_repeated_traces(model: Any, snapshot: Any, graph: Any) -> None:
    one, two, three = (torch.randint(19, (1, n)) for n in (3, 4, 5))
    before = snapshot(model)
    with trace(model, graph=graph) as outer:
        model(one)
        with trace(model, graph=graph) as inner:
            model(two)
        model(three)
    before.check()

    def lengths(t: Any) -> list[int]:
        return [layer.output.shape[1] for layer in t.layers]

    assert lengths(inner) == [4] * 3
    assert lengths(outer) == [3] * 3 + [4] * 3 + [5] * 3
    model(one)
    assert len(outer.layers) == 9 and len(inner.layers) == 3


def test_user_hooks_are_kept_and_run(model: Any, snapshot: Any) -> None:
    mixer, block = model.backbone.layers[1].mixer, model.backbone.layers[1]
    seen: list[str] = []
    mixer.register_forward_hook(lambda *_: seen.append("hook"))
    mixer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    mixer.register_forward_hook(lambda *_: seen.append("always"), always_call=True)
    mixer.register_forward_hook(lambda *_, **__: seen.append("kwargs"), with_kwargs=True)
    block.register_forward_pre_hook(lambda *_: seen.append("block"))
    mixer.register_full_backward_hook(lambda *_: None)
    expected = ["block", "pre", "hook", "always", "kwargs"]
    tokens = ids()
    before = snapshot(model)
    for graph in GRAPHS:
        seen.clear()
        with torch.no_grad(), trace(model, graph=graph) as t:
            model(tokens)
        assert seen == expected
        before.check()
        assert len(t.layers) == 3
        seen.clear()
        model(tokens)
        assert seen == expected
        before.check()


def test_what_user_hooks_change_is_recorded(model: Any) -> None:
    mixer = model.backbone.layers[1].mixer
    shift = torch.randn(5)
    mixer.register_forward_pre_hook(lambda _, args: (args[0] + shift,))
    normed: list[Tensor] = []
    model.backbone.layers[1].norm.register_forward_hook(lambda *a: normed.append(a[2]))
    with torch.no_grad(), trace(model) as t:
        model(ids())
    assert torch.equal(t.layers[1].call.hidden_states, normed[0] + shift)
    assert t.layers[1].reconstruction_error() <= 2e-5
