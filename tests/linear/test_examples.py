"""Gates of adapters, where nothing enters them."""

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

from captum_ssm import trace
from captum_ssm.mixers import Call, LinearMixer
from captum_ssm.operators import Diagonal
from captum_ssm.tracing import Layer

pytestmark = transformers5


def layers_of(case: architectures.Case) -> list[Layer]:
    with torch.no_grad(), trace(case.model, operators=False) as record:
        case.model(case.inputs)
    kinds = {type(layer.mixer.module): layer for layer in record.layers}
    for layer in kinds.values():
        layer.mixer.module.double()
    return list(kinds.values())


def linearized(layer: Layer, hidden: Tensor) -> LinearMixer:
    before, call = layer.call.hidden_states, layer.call

    def exchanged(value: Any) -> Any:
        return hidden if value is before else value

    given: Call = replace(
        call,
        args=tuple(map(exchanged, call.args)),
        kwargs={name: exchanged(value) for name, value in call.kwargs.items()},
    )
    return layer.mixer.linearize(layer.mixer.module, given)


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
