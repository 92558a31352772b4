"""Matrices per state, and queries, keys and histories, against loops of the paper's equations."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles import selection as loops
from oracles.selection import Wanted, by_loops
from torch import Tensor
from zoo.mamba import padded_batch, randomise, transformers_model
from zoo.selection import CHANNELS, KINDS, MASKED, explain, make_mixer, spread_steps

from captum_ssm import ImplicitAttention
from captum_ssm.attr.engine.factors import Factors
from captum_ssm.tracing import repaired_scans

pytestmark = pytest.mark.slow

FLOAT64, FLOAT32, TYPICAL = 1e-11, 1e-5, 5e-7


def check_factors(found: Factors, wanted: Wanted, tolerance: float) -> None:
    assert relative_error(found.query, wanted.query) <= tolerance
    assert relative_error(found.key, wanted.key) <= tolerance
    assert relative_error(found.history, wanted.history) <= tolerance
    assert relative_error(found.states(), wanted.states) <= tolerance


# --- the equations ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch, tokens", [(3, 1), (2, 6)])
def test_equations_in_float64(kind: str, batch: int, tokens: int) -> None:
    mixer, width, select = make_mixer(kind)
    hidden = torch.randn(batch, tokens, width, dtype=torch.float64)
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


@pytest.mark.parametrize("kind", KINDS)
def test_equations_in_float32(kind: str) -> None:
    errors = []
    for _ in range(5):
        mixer, width, select = make_mixer(kind)
        hidden = torch.randn(2, 5, width)
        attention, call = explain(mixer, hidden)
        scans = select(mixer, hidden, None)
        exact = by_loops(scans, CHANNELS, simplified=False)
        (states,) = attention.states(channels=CHANNELS, **call)
        (factors,) = attention.factors(channels=CHANNELS, **call)
        assert states.dtype == factors.query.dtype == factors.history.dtype == torch.float32
        check_factors(factors, exact, FLOAT32)
        errors.append(relative_error(states, exact.states))
    assert max(errors) <= FLOAT32
    assert statistics.median(errors) <= TYPICAL


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


@pytest.mark.parametrize("kind", ["mamba", "jamba", "mamba2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: str, dtype: torch.dtype) -> None:
    mixer, width, select = make_mixer(kind)
    mixer, hidden = mixer.to(dtype), torch.randn(2, 5, width).to(dtype)
    attention, call = explain(mixer, hidden)
    wanted = by_loops(select(mixer, hidden, None), CHANNELS, simplified=False)
    (states,) = attention.states(channels=CHANNELS, **call)
    (factors,) = attention.factors(channels=CHANNELS, **call)
    assert states.dtype == factors.key.dtype == torch.float32
    assert relative_error(states, wanted.states) <= FLOAT32
    check_factors(factors, wanted, FLOAT32)


@pytest.mark.parametrize("kind", ["make_mamba", "make_mamba2"])
def test_mamba_ssm(mamba_ssm: Any, kind: str) -> None:
    options = {"headdim": 4, "ngroups": 2} if kind == "make_mamba2" else {}
    mixer = spread_steps(randomise(getattr(mamba_ssm, kind)(8, d_state=3, **options)))
    hidden = torch.randn(2, 5, 8)
    attention, call = explain(mixer, hidden)
    scans = (loops.mamba2 if options else loops.mamba)(mixer, hidden, None)
    (states,) = attention.states(channels=CHANNELS, **call)
    for simplified in (False, True):
        wanted = by_loops(scans, CHANNELS, simplified)
        (factors,) = attention.factors(channels=CHANNELS, simplified=simplified, **call)
        check_factors(factors, wanted, FLOAT32)
        assert simplified or relative_error(states, wanted.states) <= FLOAT32


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


# --- their sum and product -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("components", ["s6", "unified-gate"])
def test_states_sum_to_the_matrices(kind: str, components: Any) -> None:
    mixer, width, _ = make_mixer(kind)
    hidden = torch.randn(2, 13, width, dtype=torch.float64)
    mask = padded_batch([13, 9])[1] if kind in MASKED else None
    attention, call = explain(mixer.double(), hidden, mask)
    (matrices,) = attention.matrices(reduce=None, components=components, **call)
    (states,) = attention.states(channels=CHANNELS, components=components, **call)
    assert states.shape[:2] == (2, 3) and states.shape[2] > 1
    assert relative_error(states.sum(2), matrices[:, CHANNELS]) <= FLOAT64
    assert not states.requires_grad and states.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_of_the_factors_are_the_states(kind: str) -> None:
    """Two algorithms: a tree or chunks of decays, and differences of summed steps."""
    errors = []
    for _ in range(5):
        mixer, width, _ = make_mixer(kind)
        attention, call = explain(mixer, torch.randn(2, 70, width))
        (states,) = attention.states(channels=CHANNELS, **call)
        (factors,) = attention.factors(channels=CHANNELS, **call)
        errors.append(relative_error(factors.states(), states))
    assert max(errors) <= FLOAT32
    assert statistics.median(errors) <= TYPICAL


def test_a_whole_model_layer_by_layer() -> None:
    model = transformers_model("mamba", num_hidden_layers=3).double()
    ids, mask = padded_batch([8, 3])
    seen: list[Tensor] = []
    mixers = [block.mixer for block in model.backbone.layers]
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for m in mixers]
    with torch.no_grad(), repaired_scans():  # the loops of a trace
        model(ids, attention_mask=mask)
    for handle in handles:
        handle.remove()
    attention = ImplicitAttention(model)
    states = attention.states(ids, [1, 6], layers=[2, 0, -1], additional_forward_args=mask)
    factors = attention.factors(ids, [1, 6], layers=[2, 0, -1], additional_forward_args=mask)
    for layer, found, product in zip([2, 0, 2], states, factors, strict=True):
        (scan,) = loops.mamba(mixers[layer], seen[layer], mask)
        wanted = by_loops([scan], [1, 6], simplified=False)
        assert relative_error(found, wanted.states) <= FLOAT64
        check_factors(product, wanted, FLOAT64)


def test_heads_of_mamba_2_share_one_history_among_their_states() -> None:
    mixer, width, _ = make_mixer("mamba2")
    attention, call = explain(mixer, torch.randn(2, 9, width))
    (factors,) = attention.factors(channels=[3, 5], **call)
    assert factors.history.shape == (2, 2, 5, 9, 9)
    assert factors.history.untyped_storage().nbytes() == 2 * 2 * 9 * 9 * 4


def test_the_backward_direction_is_un_flipped() -> None:
    mixer, width, _ = make_mixer("vim v2 halved")
    attention, call = explain(mixer, torch.randn(1, 7, width))
    (states,) = attention.states(channels=[2], **call)
    (factors,) = attention.factors(channels=[2], **call)
    lower = torch.ones(7, 7).tril().bool()
    for found in (states, factors.history):
        ahead, back = found.chunk(2, dim=2)
        assert ahead.shape[2] == 3
        assert torch.equal(ahead != 0, lower.expand_as(ahead))
        assert torch.equal(back != 0, lower.mT.expand_as(back))


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
