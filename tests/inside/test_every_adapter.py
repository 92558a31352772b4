"""Activations of every architecture: what explains them and what they explain sums up."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from helpers.activations import blocks_of, in_float64, mixer_calls, own_activations, target_of
from helpers.sessions import thorough
from torch import Tensor
from zoo.adapters import ADAPTERS
from zoo.architectures import Case

from captum_ssm import LatimFlow, LayerLatimFlow, NeuronLatimFlow
from captum_ssm.attr.engine.decompose import Decomposition

pytestmark = pytest.mark.transformers5
#: Norms and rotations are computed in float32 whatever the model is in.
FLOAT32 = 1e-5
#: Blocks that are given the embeddings anew, past the stream.
PASSED_BY = ("zamba", "zamba2", "zamba with attention", "zamba2 with attention")


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return in_float64(ADAPTERS[request.param](monkeypatch))


every = pytest.mark.parametrize("case", thorough(ADAPTERS, ("mamba2", "mamba_ssm")), indirect=True)


def left_over(found: Decomposition) -> float:
    """What is left of the output, as a share of all that adds to it."""
    size = found.inputs.abs().flatten(1).sum(1) + found.output.abs()
    return float((found.delta.abs() / size).max())


def close(found: Tensor, wanted: Tensor) -> float:
    return oracles.relative_error(found.double(), wanted.double())


@every
def test_layers_around_every_kind_of_block(case: Case, request: pytest.FixtureRequest) -> None:
    blocks, target = blocks_of(case), target_of(case)
    own = own_activations(case, blocks)
    for name in blocks:
        for at_input in (True, False):
            explain = LayerLatimFlow(case.model, name)
            found = explain.decompose(case.inputs, target, None, at_input)
            value = torch.cat(own[name, at_input], -1)
            assert found.inputs.shape == value.shape, name
            assert found.sizes == tuple(x.shape[-1] for x in own[name, at_input])
            assert left_over(found) <= FLOAT32, name
            passed_by = bool(found.virtual.any())
            assert not passed_by or request.node.callspec.params["case"] in PASSED_BY, name


@every
def test_neurons_around_every_kind_of_block(case: Case) -> None:
    blocks = blocks_of(case)
    own = own_activations(case, blocks)
    for name in blocks:
        for at_input in (True, False):
            values = own[name, at_input]
            token, feature = values[0].shape[1] // 2, 1

            def chosen(tensors: Any, token: int = token, feature: int = feature) -> Tensor:
                return sum(x[:, token, feature] for x in tensors)

            selector: Any = chosen if len(values) > 1 else (token, feature)
            explain = NeuronLatimFlow(case.model, name)
            found = explain.decompose(case.inputs, selector, None, at_input)
            assert close(found.output, chosen(values)) <= FLOAT32, name
            assert left_over(found) <= FLOAT32 and not found.virtual.any(), name


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
        assert found.shape == wanted.shape and close(found, wanted) <= FLOAT32, mixer
        if stream is not None:
            entering = LayerLatimFlow(case.model, block).attribute(case.inputs, target, None, True)
            if not isinstance(entering, tuple):
                assert close(entering, stream) <= FLOAT32, block
    assert next(of_blocks, None) is None
