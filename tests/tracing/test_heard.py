"""What the run has computed, which adapters are told instead of computing it again."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.stand_in import StandIn
from helpers.versions import transformers5
from torch import Tensor, nn
from zoo.mamba import randomise, transformers_model
from zoo.mamba2 import make_model

from captum_ssm import ImplicitAttentionRollout, LatimFlow, trace
from captum_ssm.mixers.parts import common

pytestmark = pytest.mark.slow

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
TARGET = (-1, 2)

EXPLAIN: dict[str, Callable[[Any], Tensor]] = {
    "rollout": lambda model: ImplicitAttentionRollout(model).attribute(
        IDS.to(model.device), query=-1
    ),
    "flow": lambda model: LatimFlow(model).attribute(IDS.to(model.device), TARGET),
}


def calls_of(model: Any, name: str, explain: Callable[[Any], Tensor]) -> list[int]:
    counts = [0] * len(model.backbone.layers)
    handles = []
    for number, block in enumerate(model.backbone.layers):

        def count(*_: Any, number: int = number) -> None:
            counts[number] += 1

        handles.append(getattr(block.mixer, name).register_forward_hook(count))
    explain(model)
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("explain", EXPLAIN.values(), ids=EXPLAIN)
@pytest.mark.parametrize("make", [transformers_model, lambda: make_model("mamba2")])
def test_input_projections_run_once(
    make: Callable[[], Any], explain: Callable[[Any], Tensor]
) -> None:
    model = make()
    assert calls_of(model, "in_proj", explain) == [1, 1]


@pytest.mark.parametrize("rule", ["frozen", "half", "centered", "balanced"])
@pytest.mark.parametrize("bias", [False, True])
def test_relevance_is_that_of_projections_run_again(
    bias: bool, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers_model("mamba", num_hidden_layers=2, use_bias=bias).double()
    randomise(model)
    told = LatimFlow(model).decompose(IDS, TARGET, rule=rule)
    monkeypatch.setattr(common, "recorded_output", lambda module, x: None)
    anew = LatimFlow(model).decompose(IDS, TARGET, rule=rule)
    assert torch.allclose(told.inputs, anew.inputs, rtol=1e-10, atol=1e-12)
    assert told.biases.keys() == anew.biases.keys()
    for name, bias_part in anew.biases.items():
        assert torch.allclose(told.biases[name], bias_part, rtol=1e-10, atol=1e-12)
    assert anew.inputs.abs().max() > 1e-3


def test_a_hook_that_answers_otherwise_each_time_is_followed() -> None:
    model = transformers_model("mamba", num_hidden_layers=2)
    answers: list[Tensor] = []

    def fade(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        answers.append(output / (1 + len(answers)))
        return answers[-1]

    model.backbone.layers[1].mixer.in_proj.register_forward_hook(fade)
    with torch.no_grad(), trace(model) as record:
        model(IDS)
    layer = record.layers[1]
    values, _ = answers[0].chunk(2, -1)
    assert len(answers) == 1
    assert torch.equal(layer.values.squeeze(-1), values)
    assert layer.reconstruction_error() < 1e-5


@pytest.mark.parametrize("in_place", [False, True])
def test_relevance_passes_a_hook_on_a_projection(in_place: bool) -> None:
    model, hooked = (transformers_model("mamba", num_hidden_layers=2).double() for _ in range(2))
    randomise(model)
    hooked.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.backbone.layers[1].mixer.in_proj.weight *= 2

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.mul_(2) if in_place else output * 2

    hooked.backbone.layers[1].mixer.in_proj.register_forward_hook(double)
    expected = LatimFlow(model).attribute(IDS, TARGET)
    assert torch.allclose(LatimFlow(hooked).attribute(IDS, TARGET), expected, rtol=1e-9)


def test_a_compiled_projection_is_told() -> None:
    model = transformers_model("mamba", num_hidden_layers=2)
    expected = ImplicitAttentionRollout(model).attribute(IDS, query=-1)
    for block in model.backbone.layers:
        block.mixer.in_proj = torch.compile(block.mixer.in_proj, backend="eager")
    assert calls_of(model, "in_proj", EXPLAIN["rollout"]) == [1, 1]
    found = ImplicitAttentionRollout(model).attribute(IDS, query=-1)
    assert torch.allclose(found, expected)


def test_a_module_that_runs_twice_is_asked_again() -> None:
    model = transformers_model("mamba", num_hidden_layers=1)
    mixer = model.backbone.layers[0].mixer
    first = mixer.in_proj.register_forward_pre_hook(
        lambda module, args: (first.remove(), module(*args), None)[-1]
    )
    counts = []
    mixer.in_proj.register_forward_hook(lambda *_: counts.append(1))
    with torch.no_grad(), trace(model):
        model(IDS)
    assert len(counts) == 3


def test_nothing_is_told_under_autocast() -> None:
    model = transformers_model("mamba", num_hidden_layers=1)

    def explain(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return EXPLAIN["rollout"](model)

    assert calls_of(model, "in_proj", explain) == [2]


# --- on a device ---------------------------------------------------------------------------------


def on_device(model: Any, explain: Callable[[Any], Tensor]) -> tuple[Tensor, int]:
    with StandIn():
        there = copy.deepcopy(model).to("cuda")
        counts = []
        there.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda *_: counts.append(1))
        found = explain(there).cpu()
    return found, len(counts)


@transformers5  # whose code names the convolution
@pytest.mark.parametrize("explain", EXPLAIN.values(), ids=EXPLAIN)
def test_on_a_device_what_a_kernel_wrote_to_is_computed_again(
    explain: Callable[[Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers_model("mamba", num_hidden_layers=1)
    expected = explain(model)
    found, runs = on_device(model, explain)
    assert runs == 1 and torch.allclose(found, expected, rtol=1e-5)
    code = sys.modules[type(model).__module__]
    convolve = code.causal_conv1d_fn

    def writing(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = convolve(x, *args, **kwargs).clone()
        x.data.zero_()
        return out

    monkeypatch.setattr(code, "causal_conv1d_fn", writing)
    found, runs = on_device(model, explain)
    assert runs > 2 and torch.allclose(found, expected, rtol=1e-5)


def test_on_a_device_nothing_is_told_to_those_who_do_not_verify() -> None:
    model = transformers_model("mamba", num_hidden_layers=1)

    def unverified(model: Any) -> Tensor:
        found = LatimFlow(model).attribute(IDS.to(model.device), TARGET, verify=False)
        assert isinstance(found, Tensor)
        return found

    _, runs = on_device(model, unverified)
    assert runs == 2
