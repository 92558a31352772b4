"""Operators that are a hundredth off in one coefficient of one component do not pass the checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.adapters import adapter_of, joins_of
from helpers.planted import Coefficient, coefficients, planted
from torch import Tensor, nn
from zoo import networks

from captum_ssm import ImplicitAttention, LatimFlow, register_mixer, trace
from captum_ssm.errors import ReconstructionError
from captum_ssm.mixers import Call, LinearMixer
from captum_ssm.tracing import Layer
from captum_ssm.tracing.verification import combined_errors, output_errors

pytestmark = pytest.mark.slow

#: Kinds of operators that differ in their coefficients.
FOUND = ("mamba", "mamba2", "recurrent_gemma", "rwkv7", "minimax", "lfm2", "vim", "xlstm", "gla")
#: What it moves less, of the largest number that a mixer returns, is no fault for float32: it is
#: some ten times what rounding moves.
SEEN = 1e-5


def of_each_class(model: nn.Module, inputs: Tensor) -> list[Layer]:
    """The first layer of each class of mixers."""
    with torch.no_grad(), trace(model, operators=False) as t:
        model(inputs)
    return list({type(layer.mixer.module): layer for layer in t.layers[::-1]}.values())


def moved(linear: LinearMixer, off: LinearMixer) -> float:
    """How far a fault moves what a mixer returns."""
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
    """By the check of whole outputs, and by that of sums over tokens."""
    case = networks.make(name, monkeypatch)
    target = networks.targets(networks.own_output(case))[0]
    seen = unseen = 0
    for layer in of_each_class(case.model, case.inputs):
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


#: Kinds of mixers that take any number of tokens, and the least share of the faults at one token
#: that sums catch of each number of tokens.
KINDS = ("mamba", "mamba2", "jamba", "recurrent_gemma", "rwkv", "qwen3_next", "minimax", "lfm2")
RATES = {16: 0.95, 512: 0.9}


@pytest.mark.parametrize("tokens", RATES)
@torch.no_grad()
def test_a_component_that_is_off_at_one_token(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth at one token of thousands may be lost in their sum, hardly ever by itself."""
    total: Counter[str] = Counter()
    for name in KINDS:
        case = networks.make(name, monkeypatch)
        for layer in of_each_class(case.model, torch.randint(0, 15, (1, tokens))):
            found = caught_at_one_token(layer)
            kind = type(layer.mixer.module).__name__
            print(f"{tokens} tokens, {kind}: {dict(found)}")
            total += found
    print(f"{tokens} tokens: {dict(total)}")
    assert total["by sums"] >= RATES[tokens] * total["faults"]
    assert total["by outputs"] >= 0.95 * total["faults"]


def caught_at_one_token(layer: Layer) -> Counter[str]:
    """How many faults there are, and how many of them each check catches."""
    linear, real, found = layer.linear, layer.call.output_tensor, Counter[str]()
    for fault in 3 * coefficients(linear):
        off = planted(linear, fault, int(torch.randint(layer.tokens, ())))
        if moved(linear, off) < SEEN:
            continue
        found["faults"] += 1
        found["by sums"] += combined_errors(off, real).strict > layer.tolerance
        found["by outputs"] += output_errors(off.output(), real).strict > layer.tolerance
    return found
