"""One build of a model of every kind, asked for what the contract of adapters does not ask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import nn
from zoo import architectures, networks
from zoo.architectures import Case, Explained, explain

from captum_ssm import (
    LatimALTI,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    StateMemory,
    trace,
)
from captum_ssm.errors import GradientModeError
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow

SAME, FLOAT32 = 1e-6, 1e-5
#: Kinds beyond the zoo whose vectors of pairs of tokens are looked at.
VECTORS = (*architectures.ZOO, "falcon_h1", "rwkv7", "xlstm", "zamba with attention")


def target_of(case: Case) -> Any:
    return 1 if networks.own_output(case).dim() == 2 else (-1, 3)


def relevance_is_conserved_without_biases(case: Case, name: str) -> None:
    if name == "gpt2 with attention":  # whose embeddings of positions are a constant
        return
    found = MambaLRP(case.model).decompose(
        case.inputs, target_of(case), zero_bias=True, verify=True
    )
    size = found.inputs.flatten(1).abs().sum(1)
    assert (found.bias.abs() <= 1e-4 * size).all()
    off = found.inputs.flatten(1).sum(1) + found.bias - found.output
    assert (off.abs() <= 1e-4 * size).all()


def vectors_add_up_to_what_mixers_return(case: Case, name: str) -> None:
    if name in VECTORS:
        assert max(LatimNorm(case.model).decomposition_error(case.inputs)) <= FLOAT32


def rows_of_shares_sum_to_one(case: Case, name: str) -> None:
    if name in VECTORS:
        for residual in (True, False):
            for rows in LatimALTI(case.model, residual=residual).maps(case.inputs):
                assert (rows >= 0).all() and (rows.sum(-1) - 1).abs().max() <= FLOAT32


def contributions_to_a_logit_add_up(case: Case, name: str) -> None:
    if name not in VECTORS:
        return
    for mixing in ("alti", "projection"):
        found = LatimLogit(case.model).decompose(case.inputs, target_of(case), mixing=mixing)
        terms = [*found.layers, *found.locals, found.embedding]
        size = sum(term.abs().sum(-1) for term in terms) + found.output.abs()
        size = size + sum(bias.abs() for bias in found.biases.values())
        assert (found.delta.abs() <= FLOAT32 * size).all()
    if case.inputs.dim() < 4:  # of images that is of the patches alone
        summed = LatimLogit(case.model).attribute(
            case.inputs, target_of(case), mixing=mixing, per_token=True
        )
        assert ((summed - found.tokens).abs().amax(-1) <= FLOAT32 * size).all()


def bfloat16_is_explained_in_float32(case: Case, name: str) -> None:
    half, rounded = copy.deepcopy(case.model).bfloat16(), copy.deepcopy(case.model)
    for parameter in rounded.parameters():  # buffers, of which some adapters know better, are not
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    x = case.inputs.bfloat16() if case.inputs.is_floating_point() else case.inputs
    found, wanted = explain(half, Case(half, x, case.silent)), explain(rounded, case)
    assert {t.dtype for t in found.tensors()} == {torch.float32}
    assert all(torch.isfinite(t).all() for t in found.tensors())
    # later layers of a mixture of experts may route another way
    assert relative_error(found.matrices[0], wanted.matrices[0]) <= 0.15


def modes_change_nothing(case: Case, name: str) -> None:
    expected = explain(case.model, case, query=None)
    without = Explained(expected.matrices, expected.rollout)
    with torch.no_grad():
        assert expected.difference(explain(case.model, case, query=None)) <= SAME
    with torch.inference_mode():
        inside = explain(case.model, case, gradients=False, query=None)
        model = copy.deepcopy(case.model)
        with pytest.raises(GradientModeError, match=r"torch\.inference_mode\(\) forbids"):
            MambaAttribution(case.model).attribute(case.inputs, **case.target)
    assert without.difference(inside) <= SAME
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(t.is_inference() for t in tensors.values())
    assert expected.difference(explain(model, case, query=None)) <= SAME
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is tensor for name, tensor in tensors.items())


def memories_of_states(case: Case, name: str) -> None:
    if name == "vit":  # attention that reads what comes later has no cache
        return
    for layer in StateMemory(case.model).of(case.inputs):
        tokens = layer.linear.operator.shape.tokens
        held, state = layer.held(tokens // 2), layer.state(tokens // 2)
        assert held.shape == (len(case.inputs), tokens)
        assert bool((held >= 0).all()) and bool(held.any())
        if not layer.is_cache:  # whose sizes are those behind the output weights
            assert bool(state.flatten(1).norm(dim=-1).le(held.sum(-1) * 1.0001).all())
        states = layer.states_at([-1, tokens // 2])
        assert torch.allclose(states[:, 1], state)
        assert torch.allclose(states[:, 0], layer.state(-1), rtol=1e-4, atol=1e-6)
        ones = torch.ones(len(case.inputs)).to(held)
        assert torch.allclose(layer.read(-1).sum(1), ones, atol=1e-4)
        assert bool((layer.half_lives() > 0).all())
        size = (len(case.inputs), layer.linear.operator.shape.heads, 1)
        assert {tuple(x.shape) for x in layer.reach([-1])} == {size}
        assert not layer.erased(0, tokens - 1)[:, 0].any()
        without, left = layer.held_without(0, -1), layer.held(-1)[:, 0]
        assert torch.allclose(without[:, 0], left, rtol=1e-4, atol=1e-7)


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def a_mixer_shared_by_two_blocks_is_two_layers(case: Case, name: str) -> None:
    model, twins = copy.deepcopy(case.model), copy.deepcopy(case.model)
    first, *others = find_mixers(model)
    second = next(m for m in others if type(m.module) is type(first.module))
    put(twins, second.name, copy.deepcopy(twins.get_submodule(first.name)))
    put(model, second.name, first.module)
    for each in (model, twins):
        if hasattr(each, "config"):
            each.config.use_cache = False  # with one the second call goes on from the first
    assert explain(twins, case).difference(explain(model, case)) <= SAME
    with torch.no_grad(), trace(model) as found:
        model(case.inputs)
    names = [layer.mixer.names for layer in found.layers if layer.mixer.module is first.module]
    assert names == [(first.name, second.name)] * 2


Question = Callable[[Case, str], None]
#: What is asked of every network, and what of the zoo alone.
OF_NETWORKS: tuple[Question, ...] = (
    relevance_is_conserved_without_biases,
    vectors_add_up_to_what_mixers_return,
    rows_of_shares_sum_to_one,
    contributions_to_a_logit_add_up,
)
OF_THE_ZOO: tuple[Question, ...] = (
    bfloat16_is_explained_in_float32,
    modes_change_nothing,
    memories_of_states,
    a_mixer_shared_by_two_blocks_is_two_layers,
)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_questions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_zoo = name in architectures.ZOO
    case = architectures.ZOO[name](monkeypatch) if in_zoo else networks.make(name, monkeypatch)
    wrong = []
    for question in (*OF_NETWORKS, *(OF_THE_ZOO if in_zoo else ())):
        try:
            question(case, name)
        except Exception as error:
            wrong.append(f"{question.__name__}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
