"""Activations of every architecture: what explains them and what they explain sums up."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from helpers.activations import blocks_of, in_float64, mixer_calls, own_activations, target_of
from helpers.sessions import thorough
from torch import Tensor
from zoo.adapters import ADAPTERS, WITH_ROUTERS
from zoo.architectures import Case

from captum_ssm import LatimFlow, LayerLatimFlow, NeuronLatimFlow
from captum_ssm.attr.engine.decompose import Decomposition

#: Norms and rotations are computed in float32 whatever the model is in.
FLOAT32 = 1e-5
#: Blocks that are given the embeddings anew, past the stream.
PASSED_BY = ("zamba", "zamba2", "zamba with attention", "zamba2 with attention")


CASES = [name for name in ADAPTERS if name not in WITH_ROUTERS]


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return in_float64(ADAPTERS[request.param](monkeypatch))


every = pytest.mark.parametrize("case", thorough(CASES, ("mamba2",)), indirect=True)


def left_over(found: Decomposition) -> float:
    """What is left of the output, as a share of all that adds to it."""
    size = found.inputs.abs().flatten(1).sum(1) + found.output.abs()
    if found.past is not None:
        size = size + found.past.abs().flatten(1).sum(1)
    return float((found.delta.abs() / size).max())


def close(found: Tensor, wanted: Tensor) -> float:
    return oracles.relative_error(found.double(), wanted.double())


def sides(case: Case) -> list[tuple[str, bool]]:
    """Outputs and inputs of blocks, and of a mixer of every kind."""
    modules = {name: case.model.get_submodule(name) for name, _ in mixer_calls(case)}
    calls = [name for name, _ in mixer_calls(case)]
    mixers = {type(modules[name]): name for name in calls if calls.count(name) == 1}
    names = [*blocks_of(case), *mixers.values()]
    return [(name, at_input) for name in names for at_input in (False, True)]


@every
def test_layers_around_blocks_and_mixers(case: Case, request: pytest.FixtureRequest) -> None:
    places, target = sides(case), target_of(case)
    own = own_activations(case, list(dict(places)))
    mixers = [name for name, _ in mixer_calls(case)]
    for name, at_input in places:
        explain = LayerLatimFlow(case.model, name)
        found = explain.decompose(case.inputs, target, None, at_input)
        values = own[name, at_input]
        assert found.inputs.shape == torch.cat(values, -1).shape, name
        assert found.sizes == tuple(x.shape[-1] for x in values), name
        assert left_over(found) <= FLOAT32, name
        if name not in mixers and request.node.callspec.params["case"] not in PASSED_BY:
            assert not found.virtual.any(), name


@every
def test_neurons_around_blocks_and_mixers(case: Case) -> None:
    places = sides(case)
    own = own_activations(case, list(dict(places)))
    for name, at_input in places:
        values = own[name, at_input]
        place = (*(size // 2 for size in values[0].shape[1:-1]), 1)

        def chosen(tensors: Any, place: tuple[int, ...] = place) -> Tensor:
            return sum(x[(slice(None), *place)] for x in tensors)

        selector: Any = chosen if len(values) > 1 else place
        explain = NeuronLatimFlow(case.model, name)
        found = explain.decompose(case.inputs, selector, None, at_input)
        scale = max(float(x.abs().max()) for x in values)  # a single neuron may be near 0
        assert float((found.output - chosen(values)).abs().max()) <= FLOAT32 * scale, name
        assert left_over(found) <= FLOAT32 and not found.virtual.any(), name


@pytest.mark.full
@every
def test_heads_of_every_kind_of_mixer(case: Case) -> None:
    """What they add, and the biases of the projection behind them, is what the mixer adds."""
    calls, target = [name for name, _ in mixer_calls(case)], target_of(case)
    modules = {name: case.model.get_submodule(name) for name in calls}
    for name in {type(modules[name]): name for name in calls if calls.count(name) == 1}.values():
        mixed = LayerLatimFlow(case.model, name).decompose(case.inputs, target)
        found = LayerLatimFlow(case.model, f"{name}.heads").decompose(case.inputs, target)
        assert found.inputs.dim() == 4 and left_over(found) <= FLOAT32, name
        behind = sum(
            (bias for module, bias in found.biases.items() if module.startswith(name)),
            torch.zeros_like(found.output),
        )
        adds = found.inputs.flatten(1).sum(1) + behind
        size = mixed.inputs.abs().flatten(1).sum(1)
        assert bool(((adds - mixed.inputs.flatten(1).sum(1)).abs() <= FLOAT32 * size).all()), name


@pytest.mark.full
@every
def test_layers_are_what_the_whole_decomposition_has_there(case: Case) -> None:
    calls, target = mixer_calls(case), target_of(case)
    whole = LatimFlow(case.model).decompose(case.inputs, target, roles=False, features=True)
    of_blocks = iter(whole.streams)
    for (mixer, block), wanted in zip(calls, whole.mixers, strict=True):
        stream = None if block is None else next(of_blocks)
        if [name for name, _ in calls].count(mixer) > 1:
            continue
        found = LayerLatimFlow(case.model, mixer).attribute(case.inputs, target)
        if isinstance(found, tuple):  # of a layer that passes on values as well
            found = found[0]
        assert found.shape == wanted.shape and close(found, wanted) <= FLOAT32, mixer
        if stream is not None:
            entering = LayerLatimFlow(case.model, block).attribute(case.inputs, target, None, True)
            if not isinstance(entering, tuple):
                assert close(entering.view_as(stream), stream) <= FLOAT32, block
    assert next(of_blocks, None) is None
