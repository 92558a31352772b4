"""Operators that are a hundredth off in one coefficient of one component do not pass the checks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers.adapters import adapter_of, joins_of
from torch import nn
from zoo import networks

from captum_ssm import ImplicitAttention, LatimFlow, register_mixer, trace
from captum_ssm.errors import ReconstructionError
from captum_ssm.mixers import Call, LinearMixer
from captum_ssm.operators import Chain, Diagonal, Operator, Sum

pytestmark = pytest.mark.slow

#: Kinds of operators that differ in their coefficients.
FOUND = ("mamba", "mamba2", "recurrent_gemma", "rwkv7", "minimax", "lfm2", "vim", "xlstm", "gla")
#: What it moves less, of the largest number that a mixer returns, is no fault for float32: it is
#: some ten times what rounding moves.
SEEN = 1e-5

#: What a coefficient is multiplied with; more than 1 would make some decays grow.
OFF = 0.99

#: The number of a leaf of the operator, and the name of one of its coefficients.
Coefficient = tuple[int, str]


def coefficients(linear: LinearMixer) -> list[Coefficient]:
    leaves = enumerate(linear.operator.leaves())
    return [(place, name) for place, leaf in leaves for name in leaf.tensors()]


def planted(linear: LinearMixer, fault: Coefficient) -> LinearMixer:
    place, name = fault
    wrong = list(linear.operator.leaves())[place]
    return replace(linear, operator=_put(linear.operator, wrong, _with(wrong, name)))


def _with(leaf: Operator, name: str) -> Operator:
    if isinstance(leaf, Diagonal):
        return Diagonal(leaf.live.get("weight", leaf.weight) * OFF, leaf.shape, leaf.component)
    off, coefficient = copy.copy(leaf), leaf.tensors()[name]
    (own,) = (key for key, value in vars(leaf).items() if value is coefficient)
    setattr(off, own, coefficient * OFF)
    return off


def _put(operator: Operator, old: Operator, new: Operator) -> Operator:
    if operator is old:
        return new
    if isinstance(operator, Chain | Sum):
        kind = Chain if isinstance(operator, Chain) else Sum
        return kind(*(_put(part, old, new) for part in operator.parts))
    return operator


def moved(linear: LinearMixer, off: LinearMixer) -> float:
    with torch.no_grad():
        right = linear.output()
        return float((off.output() - right).abs().max() / right.abs().max())


@contextmanager
def plant(module: nn.Module, fault: Coefficient) -> Iterator[None]:
    """The adapter of a mixer's class plants a fault in this one mixer."""
    right, joins = adapter_of(module), joins_of(module)

    def adapter(mixer: nn.Module, call: Call) -> LinearMixer:
        linear = right(mixer, call)
        return planted(linear, fault) if mixer is module else linear

    register_mixer(type(module), adapter, joins=joins)
    yield
    register_mixer(type(module), right, joins=joins)


@pytest.mark.parametrize("name", FOUND)
def test_a_component_that_is_off_for_all_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = networks.make(name, monkeypatch)
    target = networks.targets(networks.own_output(case))[0]
    seen = unseen = 0
    with torch.no_grad(), trace(case.model, operators=False) as t:
        case.model(case.inputs)
    for layer in {type(layer.mixer.module): layer for layer in t.layers[::-1]}.values():
        for fault in coefficients(layer.linear):
            if moved(layer.linear, planted(layer.linear, fault)) < SEEN:
                unseen += 1
                continue
            seen += 1
            for method in (LatimFlow, ImplicitAttention):
                with plant(layer.mixer.module, fault), pytest.raises(ReconstructionError) as caught:
                    method(case.model).attribute(case.inputs, target)
                assert repr(layer.name) in str(caught.value), fault
    assert seen >= 2 and unseen <= 2
