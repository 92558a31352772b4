"""Memories of whole models."""

from __future__ import annotations

import pytest
import torch
from zoo.architectures import ZOO, Case, every
from zoo.small import mamba_lm

from captum_ssm import StateMemory, trace
from captum_ssm.errors import OptionError, QueryError
from captum_ssm.operators.readings.memory import memories_of


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return ZOO[request.param](monkeypatch)


#: Of softmax attention, and of short convolutions, there is no state.
NONE = ("gpt_neox", "vit", "lfm2")


@every([name for name in ZOO if name not in NONE])
def test_every_recurrence(case: Case) -> None:
    for layer in StateMemory(case.model).of(case.inputs):
        tokens = layer.linear.operator.shape.tokens
        held = layer.held(tokens // 2)
        assert held.shape == (len(case.inputs), tokens)
        assert bool((held >= 0).all())
        assert bool(held.any())
        state = layer.state(tokens // 2)
        assert bool(state.flatten(1).norm(dim=-1).le(held.sum(-1) * 1.0001).all())
        assert torch.allclose(layer.states_at([tokens // 2])[:, 0], state)
        assert torch.allclose(
            layer.read(-1).sum(1), torch.ones(len(case.inputs)).to(held), atol=1e-4
        )
        assert bool((layer.half_lives() > 0).all())
        mean, spread = layer.reach([-1])
        assert (
            mean.shape == spread.shape == (len(case.inputs), layer.linear.operator.shape.heads, 1)
        )
        erased = layer.erased(0, tokens - 1)
        assert not erased[:, 0].any()


def test_heads_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = StateMemory(mamba_lm()).of(torch.randint(15, (2, 9)))[1]
    whole = layer.held(5, by_head=True), layer.state(-1), layer.erased(1, 7), layer.half_lives()
    monkeypatch.setattr("captum_ssm.attr.memory._ELEMENTS", 1)
    parts = layer.held(5, by_head=True), layer.state(-1), layer.erased(1, 7), layer.half_lives()
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other)
    assert torch.allclose(layer.held(5), whole[0].norm(dim=1))


def test_the_state_is_the_one_of_the_run() -> None:
    """What it holds of all tokens, read by the last one, is what the operator returns there."""
    model, ids = mamba_lm().double(), torch.randint(15, (2, 9))
    with torch.no_grad(), trace(model) as record:
        model(ids)
    layer, linear = StateMemory(model).of(ids)[1], record.layers[1].linear
    scan = next(x for x in linear.operator.leaves() if type(x).__name__ == "SelectiveScan")
    (memory,) = memories_of(linear.operator, linear.values)
    read = torch.einsum("bn,bhnp->bhp", scan.c[:, -1], layer.state(-1))
    assert torch.allclose(read, scan.apply(memory.value)[:, -1])


def test_reads_until_a_token() -> None:
    layer = StateMemory(mamba_lm()).of(torch.randint(15, (2, 9)))[1]
    whole, early = layer.read(7), layer.read(7, until=4)
    assert torch.equal(early[:, :5], whole[:, :5])
    assert not early[:, 5:].any()
    assert not whole[:, 8:].any()


def test_what_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NONE:
        case = ZOO[name](monkeypatch)
        with pytest.raises(OptionError, match="No layer has a state"):
            StateMemory(case.model).of(case.inputs)
    layer = StateMemory(mamba_lm()).of(torch.randint(15, (1, 6)))[0]
    with pytest.raises(QueryError, match="token=6"):
        layer.held(6)
    with pytest.raises(QueryError, match="source=-7"):
        layer.erased(-7, 3)
    with pytest.raises(OptionError, match="queries"):
        layer.reach("last")
