"""Adapters under the rules: whose constants are whose, and where gates are at rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.marks import slow_but
from helpers.versions import transformers5
from torch import Tensor
from zoo import architectures
from zoo.adapters import ADAPTERS
from zoo.networks import MASKED

from captum_ssm import trace
from captum_ssm.attr.engine.decompose import account
from captum_ssm.linear import FAMILY
from captum_ssm.linear.mode import Linearising
from captum_ssm.linear.network import through
from captum_ssm.mixers import Call, LinearMixer
from captum_ssm.operators import Diagonal
from captum_ssm.tracing import Layer

pytestmark = transformers5
#: By how much one example is larger, so that its constants do not pass for those of another.
LOUD = 30.0
#: Rotations and norms of some layers of attention are computed in float32.
FLOAT32 = 1e-6


def layers_of(case: architectures.Case, mask: Tensor | None = None) -> list[Layer]:
    """A recorded call of every class of mixers, in float64."""
    options = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad(), trace(case.model, operators=False) as record:
        case.model(case.inputs, **options)
    kinds = {type(layer.mixer.module): layer for layer in record.layers}
    for layer in kinds.values():
        layer.mixer.module.double()
    return list(kinds.values())


def linearized(layer: Layer, hidden: Tensor) -> LinearMixer:
    """The mixer in that call, but with another sequence entering it."""
    before, call = layer.call.hidden_states, layer.call

    def exchanged(value: Any) -> Any:
        return hidden if value is before else value

    given: Call = replace(
        call,
        args=tuple(map(exchanged, call.args)),
        kwargs={name: exchanged(value) for name, value in call.kwargs.items()},
    )
    return layer.mixer.linearize(layer.mixer.module, given)


def assert_each_has_its_constants(layers: list[Layer]) -> None:
    """In one account of the whole batch, of which one example is far larger than the other."""
    for layer in layers:
        hidden = torch.randn_like(layer.call.hidden_states, dtype=torch.float64)
        hidden[1] *= LOUD
        for rule in FAMILY:
            mode = Linearising(None, rule, where=lambda: "mixer")
            with mode:
                out = through(linearized(layer, mode.begin(hidden)), mode)
            output = (out * torch.randn_like(out)).flatten(1).sum(1)
            assert mode.root is not None
            (gradient,), biases = account(mode.ledger, output, None, [mode.root])
            relevance, constants = (gradient * hidden).flatten(1), biases.values()
            left = output - relevance.sum(1) - sum(constants)
            size = output.abs() + relevance.abs().sum(1) + sum(x.abs() for x in constants)
            assert bool((left.abs() <= FLOAT32 * size).all()), (layer.name, rule)


@pytest.mark.parametrize("name", slow_but(("mamba2", "recurrent_gemma", "rwkv", "vim"), ADAPTERS))
def test_constants_stand_with_their_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_each_has_its_constants(layers_of(ADAPTERS[name](monkeypatch)))


@pytest.mark.parametrize("name", slow_but(("mamba",), MASKED))
def test_so_they_do_beside_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ADAPTERS[name](monkeypatch)
    mask = torch.ones_like(case.inputs)
    mask[0, :3] = 0
    assert_each_has_its_constants(layers_of(case, mask))


@pytest.mark.parametrize("name", slow_but(("mamba2", "minimax", "rwkv"), ADAPTERS))
def test_a_gate_that_nothing_enters_is_at_rest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in layers_of(ADAPTERS[name](monkeypatch)):
        with torch.no_grad():
            for parameter, value in layer.mixer.module.named_parameters():
                if parameter.endswith("bias"):
                    value.zero_()
            nothing = torch.zeros_like(layer.call.hidden_states, dtype=torch.float64)
            leaves = list(linearized(layer, nothing).operator.leaves())
        for gate in leaves:
            if isinstance(gate, Diagonal) and gate.component == "gate":
                at_rest = torch.zeros_like(gate.weight) + gate.at_rest
                torch.testing.assert_close(gate.weight, at_rest, rtol=0, atol=1e-6)
