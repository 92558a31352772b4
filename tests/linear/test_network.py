"""Whole networks under the rules: the same outputs, exactly linear."""

from __future__ import annotations

import oracles
import pytest
import torch
from torch import Tensor
from zoo import architectures, networks
from zoo.networks import STRAIGHT_IN

from captum_ssm import LatimFlow
from captum_ssm.attr.call.targets import logits_of
from captum_ssm.attr.engine.decompose import Decomposition
from captum_ssm.linear import linearized

pytestmark = pytest.mark.slow

#: That relevance adds up in every other network is a clause of check_adapter.
NAMES = ("mamba2", "jamba", "recurrent_gemma", "vim, two cls", "gpt_neox", "vmamba with gate")
GATES = ("frozen", "half")


def every(names):
    return pytest.mark.parametrize("name", names)


def imbalance(found: Decomposition) -> float:
    size = found.output.abs() + found.inputs.flatten(1).abs().sum(1)
    size = size + sum(b.abs() for b in found.biases.values())
    return float((found.delta.abs() / size).max())


def under_the_rules(case: architectures.Case, gate: str) -> Tensor:
    with linearized(case.model, case.inputs, rule=gate) as network:
        return logits_of(case.model(network.mode.begun(case.inputs)))


@every(NAMES)
def test_outputs_stay_and_terms_sum_to_them(name, monkeypatch):
    case = networks.make(name, monkeypatch)
    own = networks.own_output(case)
    explain = LatimFlow(case.model)
    examples = torch.arange(3)
    relevance = []
    for gate in GATES:
        assert oracles.relative_error(under_the_rules(case, gate), own) <= 1e-5
        asked = networks.targets(own)
        for target, found in zip(
            asked, explain.decompose_each(case.inputs, asked, rule=gate), strict=True
        ):
            index = torch.tensor(target if isinstance(target, list) else [target] * 3).view(3, -1)
            wanted = own[(examples, *index.unbind(-1))]
            assert (found.output - wanted).abs().max() <= 1e-5 * own.abs().max()
            assert imbalance(found) <= 1e-5
            relevance.append(found.inputs)
    assert all(x.flatten(1).any(1).all() for x in relevance)


@every(NAMES)
def test_streams_and_mixers(name, monkeypatch):
    case = networks.make(name, monkeypatch)
    target = networks.targets(networks.own_output(case))[0]
    found = LatimFlow(case.model).decompose(case.inputs, target, baselines=0)  # as streams are
    assert len(found.mixers) >= 2 and len(found.streams) == len(found.mixers)
    shape = found.tokens.shape if case.inputs.dim() == 2 else found.streams[0].shape
    assert [part.shape for part in found.streams] == [part.shape for part in found.mixers]
    assert {part.shape for part in found.mixers} == {shape} or name.startswith("vmamba")
    assert all(part.any() for part in (*found.streams, *found.mixers))
    if name in STRAIGHT_IN:
        assert oracles.relative_error(found.streams[0], found.tokens) <= 1e-5


@every([name for name in NAMES if not name.startswith("v")])
def test_ids_are_their_embeddings_and_examples_are_alone(name, monkeypatch):
    case = networks.make(name, monkeypatch)
    target = networks.targets(networks.own_output(case))[0]
    explain = LatimFlow(case.model)
    tokens, delta = explain.attribute(case.inputs, target, return_convergence_delta=True)
    assert tokens.shape == case.inputs.shape and delta.shape == (3,)
    embedded = networks.embedding(case.model)(case.inputs).detach()
    features = explain.attribute(embedded, target)
    assert features.shape == embedded.shape
    assert oracles.relative_error(features.sum(-1), tokens) <= 1e-5
    alone = torch.cat([explain.attribute(ids[None], target) for ids in case.inputs])
    assert oracles.relative_error(alone, tokens) <= 1e-5
