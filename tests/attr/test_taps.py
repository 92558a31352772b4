"""Activations tap by tap: which functions may stand for a model's own, and which is found."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.latim_vectors import a_model, all_vectors, layer_of, record
from oracles import latim as oracle
from oracles import relative_error
from torch import nn
from zoo.mamba import padded_batch, transformers_model

from captum_ssm.attr.vectors.contributions import Contributions
from captum_ssm.attr.vectors.taps import ACTIVATIONS, check_activation
from captum_ssm.errors import OptionError, UnsupportedMixerError
from captum_ssm.operators import Chain, DenseHeads, Diagonal, ShortConv

# float32, for any draw of the parameters; typical is 2e-7
FLOAT32 = 1e-5
EXACT = 1e-12


@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "silu"])
def test_silu_stands_for_the_models_own_activation(hidden_act: str) -> None:
    model = transformers_model(hidden_act=hidden_act).double()
    layer = record(model, padded_batch([6])[0])[0]
    mixer = layer.mixer.module
    own = {"gelu": nn.functional.gelu, "relu": torch.relu, "silu": nn.functional.silu}[hidden_act]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(oracle.FUNCTIONS, "silu", own)
        wanted = oracle.mamba1(mixer, layer.call.hidden_states, "silu")
    assert relative_error(all_vectors(layer, "silu"), wanted) <= EXACT


def test_identity_is_exact_for_a_model_without_activation() -> None:
    model = transformers_model(hidden_act="linear").double()
    layer = record(model, padded_batch([6])[0])[0]
    for activation in ("identity", "silu", "linearized"):
        with torch.no_grad():
            parts = Contributions(layer, activation)
            whole = parts.total() + parts.constant()
        assert relative_error(whole, layer.linear.output()) <= EXACT, activation


@pytest.mark.parametrize("name", ["rwkv", "gpt_neox", "lfm2", "recurrent_gemma", "gla"])
def test_without_activation_all_choices_are_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_model(name, monkeypatch)
    for layer in record(case.model, case.inputs):
        linear = all_vectors(layer)
        assert all(torch.equal(all_vectors(layer, a), linear) for a in ACTIVATIONS)


@pytest.mark.parametrize("name", ["minimax", "qwen3_next", "mamba_ssm", "mamba2_ssm", "jamba"])
def test_other_choices_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single tap (minimax) passes its own activation whole; no other choice is exact."""
    case = a_model(name, monkeypatch)
    layer = record(case.model, case.inputs)[0]
    found = {a: all_vectors(layer, a) for a in ACTIVATIONS}
    for one, other in itertools.combinations(ACTIVATIONS, 2):
        same = name == "minimax" and {one, other} == {"silu", "linearized"}
        assert (relative_error(found[one], found[other]) <= FLOAT32) == same, (one, other)


# --- what is refused ----------------------------------------------------------------------------


def test_unknown_activations() -> None:
    with pytest.raises(OptionError, match=r"activation='gelu' is not known\. Use one of"):
        check_activation("gelu")


class WithoutActivation(nn.Module):
    """A mixer that does not say what its activation is."""


def test_activations_that_cannot_be_found() -> None:
    attention = DenseHeads(torch.rand(1, 3, 4, 4), 2)
    act = Diagonal(torch.rand(1, 4, 3, 2), attention.shape, "activation")
    conv = ShortConv(torch.rand(3, 2, 2), attention.shape)
    layer = layer_of(Chain(attention, act, conv), WithoutActivation())
    assert all_vectors(layer, "taylor2").any()
    with pytest.raises(UnsupportedMixerError, match="WithoutActivation: its activation was not"):
        all_vectors(layer, "silu")
    behind_another = layer_of(Chain(act, attention, act, conv), WithoutActivation())
    assert all_vectors(behind_another).any()
    with pytest.raises(UnsupportedMixerError, match="at most a short convolution in front of it"):
        all_vectors(behind_another, "relu")
    recurrent = layer_of(Chain(act, attention), WithoutActivation())
    with pytest.raises(UnsupportedMixerError, match="Use activation='linearized'"):
        all_vectors(recurrent, "identity")
