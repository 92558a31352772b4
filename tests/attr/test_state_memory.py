"""Memories of whole models."""

from __future__ import annotations

import pytest
import torch
from zoo.architectures import ZOO
from zoo.small import mamba_lm

from captum_ssm import StateMemory, trace
from captum_ssm.attr.engine.memories import memories_of
from captum_ssm.errors import InputError, OptionError, QueryError
from captum_ssm.tracing import record

pytestmark = pytest.mark.slow

#: Attention that reads what comes later has no cache.
NONE = ("vit",)


def test_the_state_is_the_one_of_the_run() -> None:
    model, ids = mamba_lm().double(), torch.randint(15, (2, 9))
    with torch.no_grad(), trace(model) as traced:
        model(ids)
    layer, linear = StateMemory(model).of(ids)[1], traced.layers[1].linear
    scan = next(x for x in linear.operator.leaves() if type(x).__name__ == "SelectiveScan")
    (memory,) = memories_of(linear.operator, linear.values)
    read = torch.einsum("bn,bhnp->bhp", scan.c[:, -1], layer.state(-1))
    assert torch.allclose(read, scan.apply(memory.value)[:, -1])


def test_operators_without_room_are_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 9))
    kept = StateMemory(model).of(ids)
    monkeypatch.setattr(record, "_OPERATOR_DIVISOR", 2**60)
    again = StateMemory(model).of(ids)
    for one, other in zip(kept, again, strict=True):
        assert one.kept is not None
        assert other.kept is None
        assert torch.equal(one.held(-1), other.held(-1))
        assert repr(one) == repr(other)
    with torch.no_grad():
        model.get_parameter(f"{again[0].name}.in_proj.weight").mul_(2)
    with pytest.raises(InputError, match="weights of the mixer were changed"):
        again[0].held(-1)


def test_what_a_cache_holds_and_what_is_read_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO["gpt_neox"](monkeypatch)
    model, ids = case.model.double(), case.inputs
    found = StateMemory(model).of(ids)
    assert len(found) == len(model.gpt_neox.layers)
    model.set_attn_implementation("eager")
    seen = []
    for block in model.gpt_neox.layers:
        block.attention.query_key_value.register_forward_hook(lambda *args: seen.append(args[2]))
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    query = ids.shape[1] - 2
    for layer, block, attention, projected in zip(
        found, model.gpt_neox.layers, weights, seen, strict=True
    ):
        heads = attention.shape[1]
        value = projected.unflatten(-1, (heads, -1)).chunk(3, -1)[2]  # (B, L, H, P)
        outputs = block.attention.dense.weight.T.unflatten(0, (heads, -1))  # (H, P, E)
        written = torch.einsum("blhp,hpe->bhle", value, outputs).norm(dim=-1)
        held = layer.held(query, by_head=True)
        assert layer.is_cache
        assert torch.allclose(held[..., : query + 1], written[..., : query + 1], rtol=1e-6)
        assert not held[..., query + 1 :].any()
        taken = attention[:, :, query].mT[..., None] * value  # (B, L, H, P)
        whole = taken.sum(1, keepdim=True)
        shares = (taken * whole).sum((-1, -2)) / whole.square().sum((-1, -2))
        assert torch.allclose(layer.read(query), shares, rtol=1e-5, atol=1e-7)
        state = layer.state(query)
        kept = value.transpose(1, 2)[:, :, : query + 1]
        assert torch.allclose(state[:, :, : query + 1], kept, rtol=1e-5, atol=1e-7)
        assert not layer.erased(0, query).any()
        assert layer.half_lives().isinf().all()


def test_reads_until_a_token() -> None:
    layer = StateMemory(mamba_lm()).of(torch.randint(15, (2, 9)))[1]
    whole, early = layer.read(7), layer.read(7, until=4)
    assert torch.equal(early[:, :5], whole[:, :5])
    assert not early[:, 5:].any()
    assert not whole[:, 8:].any()


def test_what_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NONE:
        case = ZOO[name](monkeypatch)
        with pytest.raises(OptionError, match="no state or cache"):
            StateMemory(case.model).of(case.inputs)
    layer = StateMemory(mamba_lm()).of(torch.randint(15, (1, 6)))[0]
    with pytest.raises(QueryError, match="token=6"):
        layer.held(6)
    with pytest.raises(QueryError, match="source=-7"):
        layer.erased(-7, 3)
    with pytest.raises(OptionError, match="queries"):
        layer.reach("last")
