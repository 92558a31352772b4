"""Channels, components and layers that have no states or no factors, and those that have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error
from zoo.attention import attention_model
from zoo.delta import Family
from zoo.mamba import randomise
from zoo.selection import CHANNELS, NORMS, explain, make_mixer

from captum_ssm import ImplicitAttention
from captum_ssm.errors import OptionError, ReconstructionError

pytestmark = pytest.mark.slow

FLOAT64 = 1e-11


# --- choices that cannot be met --------------------------------------------------------------


@pytest.mark.parametrize("method", ["states", "factors"])
@pytest.mark.parametrize("channels", [3, [], None, (), [0.5], ["a"]])
def test_channels_must_be_a_list_of_integers(method: str, channels: Any) -> None:
    mixer, width, _ = make_mixer("mamba")
    with pytest.raises(OptionError, match=r"^channels.* (must (be a )?list|numbered by integers)"):
        getattr(ImplicitAttention(mixer), method)(torch.randn(1, 3, width), channels)


@pytest.mark.parametrize("method", ["states", "factors"])
@pytest.mark.parametrize("kind, count", [("mamba", 10), ("mamba2", 24)])
@pytest.mark.parametrize("beyond", [0, 5])
def test_channels_must_be_there(method: str, kind: str, count: int, beyond: int) -> None:
    mixer, width, _ = make_mixer(kind)
    explained = getattr(ImplicitAttention(mixer), method)
    for outside in (count + beyond, -count - 1 - beyond):
        with pytest.raises(OptionError, match=rf"\[{outside}\].*channels 0 to {count - 1}"):
            explained(torch.randn(1, 3, width), [0, outside])


def test_channels_come_in_the_order_asked_for() -> None:
    mixer, width, _ = make_mixer("mamba2")
    attention, call = explain(mixer, torch.randn(2, 5, width))
    (states,) = attention.states(channels=range(24), **call)
    (factors,) = attention.factors(channels=range(24), **call)
    chosen = [23, 0, -24, -1, 4]
    (some,) = attention.states(channels=torch.tensor(chosen), **call)
    assert torch.equal(some, states[:, chosen])
    (some_factors,) = attention.factors(channels=tuple(chosen), **call)
    assert torch.equal(some_factors.query, factors.query[:, :, chosen])
    assert torch.equal(some_factors.key, factors.key[:, :, chosen])
    # where channels lie elsewhere in memory, another loop takes the powers
    assert relative_error(some_factors.history, factors.history[:, chosen]) <= 1e-6


@pytest.mark.parametrize("components", ["exact", "unified-scan", {"skip"}, {"gate", "conv"}])
def test_components_must_be_a_sum_over_states(components: Any) -> None:
    mixer, width, _ = make_mixer("mamba")
    with pytest.raises(OptionError, match="sum over states"):
        ImplicitAttention(mixer).states(torch.randn(1, 3, width), [0], components=components)
    with pytest.raises(OptionError, match="not known"):
        ImplicitAttention(mixer).states(torch.randn(1, 3, width), [0], components="scan2")


def test_attention_layers_of_a_hybrid_are_named() -> None:
    model = attention_model("jamba", "sdpa", **NORMS)
    ids = torch.randint(1, 23, (2, 5))
    attention = ImplicitAttention(model)
    for method in (attention.states, attention.factors):
        with pytest.raises(OptionError, match=r"self_attn.*Jamba.*DenseHeads.*layers="):
            method(ids, [0])
        assert len(method(ids, [0], layers=[0, 2])) == 2


def test_verify() -> None:
    mixer, width, _ = make_mixer("mamba")
    attention, call = explain(mixer, torch.randn(1, 5, width))
    attention.states(channels=[0], verify=True, **call)
    for method in (attention.states, attention.factors):
        with pytest.raises(ReconstructionError):
            method(channels=[0], verify=1e-30, **call)


# --- other recurrences -----------------------------------------------------------------------


def xlstm() -> Any:
    from transformers import xLSTMConfig, xLSTMForCausalLM

    config = xLSTMConfig(
        vocab_size=19,
        hidden_size=16,
        num_heads=2,
        num_hidden_layers=1,
        ffn_round_up_to_multiple_of=8,
        chunk_size=16,
        norm_eps=1e-3,
    )
    return randomise(xLSTMForCausalLM(config)).double()


def minimax() -> Any:
    layers = ["linear_attention", "full_attention"]
    return attention_model("minimax", "sdpa", layer_types=layers).double()


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("make", [xlstm, minimax])
def test_other_decaying_heads_have_states_but_no_steps(make: Any, tokens: int) -> None:
    model = make()
    ids = torch.randint(1, 19, (2, tokens))
    attention = ImplicitAttention(model, layers=[first_recurrence(model)])
    for components in ("s6", "unified"):
        (matrices,) = attention.matrices(ids, reduce=None, components=components)
        (states,) = attention.states(ids, CHANNELS, components=components)
        assert states.shape[2] > 1
        assert relative_error(states.sum(2), matrices[:, CHANNELS]) <= FLOAT64
    with pytest.raises(OptionError, match=r"step size dt.* its ScalarDecayHeads has none.*states"):
        attention.factors(ids, CHANNELS)


def first_recurrence(model: Any) -> str:
    kinds = ("xLSTMLayer", "MiniMaxLightningAttention")
    return next(name for name, m in model.named_modules() if type(m).__name__ in kinds)


@pytest.mark.parametrize("method", ["states", "factors"])
def test_recurrences_whose_states_mix_are_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Family("qwen3_next", monkeypatch).model()
    with pytest.raises(OptionError, match="DeltaRule"):
        ids = torch.randint(1, 19, (1, 4))
        getattr(ImplicitAttention(model), method)(ids, [0], verify=False)
