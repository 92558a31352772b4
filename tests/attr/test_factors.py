"""Matrices per state, and queries, keys and histories, against loops of the paper's equations."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from oracles import relative_error, vim
from oracles import selection as loops
from oracles.mamba2_formula import form_of
from oracles.selection import Wanted, by_loops
from torch import Tensor, nn
from zoo import mamba2
from zoo.attention import attention_model
from zoo.delta import Family
from zoo.mamba import padded_batch, randomise, transformers_model

from captum_ssm import ImplicitAttention
from captum_ssm.attr.engine.factors import Factors
from captum_ssm.errors import OptionError
from captum_ssm.models.vim import VimMixer

pytestmark = pytest.mark.slow

FLOAT64, FLOAT32 = 1e-11, 1e-5


#: An epsilon that keeps norms of two features well conditioned.
NORMS = {"rms_norm_eps": 0.05}


def spread_steps(mixer: Any) -> Any:
    """The mixer with biases of dt that put S_Delta on both sides of zero."""
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.endswith(("dt_proj.bias", "dt_proj_b.bias", "dt_proj_bias", "dt_bias")):
                parameter.copy_(1.5 * torch.randn_like(parameter))
    return mixer


def mixer_named(model: nn.Module, kind: str) -> Any:
    return next(m for m in model.modules() if type(m).__name__ == kind)


def make_mixer(kind: str, **options: Any) -> tuple[Any, int, loops.Select]:
    if kind in ("mamba", "falcon_mamba"):
        model = transformers_model(kind, **options)
        return spread_steps(model.backbone.layers[0].mixer), 5, loops.mamba
    if kind in ("jamba", "zamba"):
        model = attention_model(kind, "sdpa", **NORMS | options)
        mixer = mixer_named(model, f"{kind.title()}MambaMixer")
        return spread_steps(mixer), 16, loops.mamba if kind == "jamba" else loops.zamba
    if kind.startswith("vim"):
        _, direction, *halved = kind.split()
        mixer = VimMixer(5, d_state=3, bimamba_type=direction, if_divide_out=bool(halved))
        return spread_steps(vim.randomise(mixer)), 5, loops.vim
    model = mamba2.make_model(kind, **options)
    mixer = spread_steps(mamba2.first_mixer(model))
    return mixer, 12, loops.mamba2(form_of(mixer, model.config))


MASKED = ["mamba", "falcon_mamba", "jamba", "zamba", "mamba2", "bamba"]
KINDS = [*MASKED, "vim none", "vim v1", "vim v2", "vim v2 halved"]
#: Mamba-2's channel 7 lies inside head 1.
CHANNELS = [7, 0, -1]


def explain(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> tuple[Any, Any]:
    call = {"inputs": hidden}
    if mask is not None:  # it comes behind a cache
        names = list(inspect.signature(type(mixer).forward).parameters)
        call["additional_forward_args"] = (*(None,) * (names.index("attention_mask") - 2), mask)
    return ImplicitAttention(mixer), call


def check_factors(found: Factors, wanted: Wanted, tolerance: float) -> None:
    assert relative_error(found.query, wanted.query) <= tolerance
    assert relative_error(found.key, wanted.key) <= tolerance
    assert relative_error(found.history, wanted.history) <= tolerance
    assert relative_error(found.states(), wanted.states) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_equations_in_float64(kind: str) -> None:
    mixer, width, select = make_mixer(kind)
    hidden = torch.randn(2, 6, width, dtype=torch.float64)
    attention, call = explain(mixer.double(), hidden)
    scans = select(mixer, hidden, None)
    channels = range(scans[0].a.shape[0])
    exact, simple = (by_loops(scans, channels, simplified) for simplified in (False, True))
    assert relative_error(exact.states, simple.states) > 1e-3
    (states,) = attention.states(channels=channels, **call)
    (factors,) = attention.factors(channels=channels, **call)
    (simplified,) = attention.factors(channels=channels, simplified=True, **call)
    assert states.dtype == factors.key.dtype == torch.float64
    assert relative_error(states, exact.states) <= FLOAT64
    check_factors(factors, exact, FLOAT64)
    check_factors(simplified, simple, FLOAT64)


@pytest.mark.parametrize("kind", MASKED)
def test_equations_with_padding_on_the_left(kind: str) -> None:
    mixer, width, select = make_mixer(kind)
    hidden = torch.randn(3, 6, width, dtype=torch.float64)
    _, mask = padded_batch([6, 2, 4])
    attention, call = explain(mixer.double(), hidden, mask)
    scans = select(mixer, hidden, mask)
    (states,) = attention.states(channels=CHANNELS, **call)
    for simplified in (False, True):
        wanted = by_loops(scans, CHANNELS, simplified)
        (found,) = attention.factors(channels=CHANNELS, simplified=simplified, **call)
        check_factors(found, wanted, FLOAT64)
        for row, length in enumerate([6, 2, 4]):
            assert not found.key[row, : 6 - length].any()
            assert not states[row, ..., : 6 - length].any()
            alone, one = explain(mixer, hidden[row : row + 1, 6 - length :])
            (single,) = alone.factors(channels=CHANNELS, simplified=simplified, **one)
            real = slice(6 - length, None)
            assert relative_error(found.query[row, real], single.query[0]) <= FLOAT64
            assert relative_error(found.key[row, real], single.key[0]) <= FLOAT64
            assert relative_error(found.history[row, ..., real, real], single.history[0]) <= FLOAT64
            (single_states,) = alone.states(channels=CHANNELS, **one)
            assert relative_error(states[row, ..., real, real], single_states[0]) <= FLOAT64


def test_a_step_at_its_limit_counts_as_if_softplus_had_returned_it() -> None:
    mixer, width, select = make_mixer("mamba2", time_step_limit=(0.8, 1.1))
    hidden = torch.randn(2, 6, width, dtype=torch.float64)
    attention, call = explain(mixer.double(), hidden)
    (scan,) = select(mixer, hidden, None)
    assert scan.limits == (0.8, 1.1)
    exact = by_loops([scan], CHANNELS, simplified=False)
    (factors,) = attention.factors(channels=CHANNELS, **call)
    check_factors(factors, exact, FLOAT64)
    scan.s_delta = torch.log(
        torch.expm1(torch.nn.functional.softplus(scan.s_delta).clamp(0.8, 1.1))
    )
    (simplified,) = attention.factors(channels=CHANNELS, simplified=True, **call)
    check_factors(simplified, by_loops([scan], CHANNELS, simplified=True), FLOAT64)


def test_long_histories_neither_overflow_nor_drift() -> None:
    """Decays of 1 - 1e-4 and of almost 0 side by side; a float32 sum would be off by 1e-4."""
    mixer, width, select = make_mixer("mamba")
    with torch.no_grad():
        mixer.A_log.copy_(torch.tensor([-9.0, 0.0, 6.0]).expand_as(mixer.A_log))
        mixer.dt_proj.bias.fill_(2.0)
    hidden = torch.randn(1, 1500, width)
    attention, call = explain(mixer, hidden)
    (factors,) = attention.factors(channels=[4], **call)
    (scan,) = select(mixer, hidden, None)
    clock = torch.nn.functional.softplus(scan.s_delta[0, :, 4]).cumsum(0)
    wanted = torch.exp((clock[:, None] - clock) * scan.a[4][:, None, None]).tril()
    wanted = torch.where(torch.ones(1500, 1500).tril() > 0, wanted, 0.0)
    assert relative_error(factors.history[0, 0], wanted) <= FLOAT32
    (states,) = attention.states(channels=[4], **call)
    assert relative_error(factors.states(), states) <= FLOAT32


def of_mamba(method: str, channels: Any, **options: Any) -> Any:
    kind = options.pop("kind", "mamba")
    mixer, width, _ = make_mixer(kind)
    return getattr(ImplicitAttention(mixer), method)(torch.randn(1, 3, width), channels, **options)


@pytest.mark.parametrize("method", ["states", "factors"])
def test_channels_that_are_not_there(method: str) -> None:
    for channels in (3, [], None, (), [0.5], ["a"]):
        with pytest.raises(OptionError, match=r"^channels.* (must list|not a list|Pass integers)"):
            of_mamba(method, channels)
    for kind, count in (("mamba", 10), ("mamba2", 24)):
        for outside in (count, -count - 1):
            with pytest.raises(OptionError, match=rf"\[{outside}\].*channels 0 to {count - 1}"):
                of_mamba(method, [0, outside], kind=kind)


@pytest.mark.parametrize("components", ["exact", "unified-scan", {"skip"}, {"gate", "conv"}])
def test_components_must_be_a_sum_over_states(components: Any) -> None:
    with pytest.raises(OptionError, match="cannot be split by state"):
        of_mamba("states", [0], components=components)


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


def test_attention_layers_of_a_hybrid_are_named() -> None:
    model = attention_model("jamba", "sdpa", **NORMS)
    ids = torch.randint(1, 23, (2, 5))
    attention = ImplicitAttention(model)
    for method in (attention.states, attention.factors):
        with pytest.raises(OptionError, match=r"self_attn.*Jamba.*DenseHeads.*layers="):
            method(ids, [0])
        assert len(method(ids, [0], layers=[0, 2])) == 2


def xlstm() -> Any:
    from transformers import xLSTMConfig, xLSTMForCausalLM

    config = xLSTMConfig(
        vocab_size=19, hidden_size=16, num_heads=2, num_hidden_layers=1,
        ffn_round_up_to_multiple_of=8, chunk_size=16, norm_eps=1e-3,
    )  # fmt: skip
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
    with pytest.raises(OptionError, match=r"step size dt.* has ScalarDecayHeads.*states"):
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
