"""LatimLogit: contributions and biases are the output, by an independent formula and in sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.latim_vectors import all_vectors, record
from oracles import latim as oracle
from oracles import relative_error
from torch import Tensor
from zoo import attention, mamba2
from zoo.mamba import transformers_model
from zoo.small import mamba_lm, mixers_of, token_ids

from captum_ssm import LatimALTI, LatimLogit
from captum_ssm.errors import GradientModeError

pytestmark = pytest.mark.slow

TARGET = {"target": (-1, 3)}


def total(found: Any) -> Tensor:
    """What the terms amount to without their signs, (B,)."""
    terms = [*found.layers, *found.locals, found.embedding]
    size = sum(term.abs().sum(-1) for term in terms) + found.output.abs()
    return size + sum(bias.abs() for bias in found.biases.values())


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "granitemoehybrid", "jamba", "minimax"])
def test_hybrids_credit_what_acts_within_tokens(family: str) -> None:
    own = family in mamba2.FAMILIES
    make = mamba2.make_model if own else attention.attention_model
    found = LatimLogit(make(family)).decompose(token_ids(2, 9), **TARGET)
    assert len(found.locals) >= 2
    assert (found.locals.abs().amax((1, 2)) > 1e-5).all()


def test_what_feeds_a_mixer_writes_nothing_itself() -> None:
    found = LatimLogit(mamba2.make_model("zamba2")).decompose(token_ids(2, 9), **TARGET)
    assert len(found.locals) == 1
    assert not found.locals.any()


def by_hand(model: Any, ids: Tensor, activation: str, mixings: list[Tensor]) -> Tensor:
    layers = record(model, ids)
    norm, head = model.backbone.norm_f, model.lm_head.weight.double()[3]
    stream = model.get_input_embeddings()(ids).detach().double()
    written = [layer.output.double() for layer in layers]
    final = stream + sum(written)
    scale = torch.rsqrt(final.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    direction = scale[:, -1] * norm.weight.double() * head  # (B, E)
    out = torch.zeros(len(layers) + 1, *ids.shape).double()
    for n, layer in enumerate(layers):
        vectors = oracle.mamba1(layer.mixer.module, layer.call.hidden_states, activation)
        for b in range(len(ids)):
            row = torch.stack([vectors[b, -1, j] @ direction[b] for j in range(ids.shape[1])])
            for earlier in reversed(mixings[:n]):
                row = row @ earlier[b]
            out[n, b] = row
    for b in range(len(ids)):
        row = torch.zeros(ids.shape[1]).double()
        row[-1] = stream[b, -1] @ direction[b]
        out[-1, b] = row
    return out


@pytest.mark.parametrize("activation", ["linearized", "silu"])
def test_mamba_by_hand(activation: str) -> None:
    model, ids = transformers_model().double(), token_ids(2, 6)
    mixings = LatimALTI(model, activation=activation).maps(ids)
    found = LatimLogit(model, activation=activation).decompose(ids, **TARGET)
    wanted = by_hand(model, ids, activation, mixings)
    # the norms of transformers compute in float32
    assert relative_error(found.layers, wanted[:-1]) <= 1e-5
    assert relative_error(found.embedding, wanted[-1]) <= 1e-5


def test_the_papers_activation_misses_part_of_the_output() -> None:
    model, ids = transformers_model(), token_ids(2, 9)
    exact = LatimLogit(model).decompose(ids, **TARGET)
    papers = LatimLogit(model, activation="silu").decompose(ids, **TARGET)
    assert torch.equal(exact.output, papers.output)
    assert papers.delta.abs().min() > 100 * exact.delta.abs().max()


def test_a_mixer_alone() -> None:
    model = torch.nn.Sequential(mixers_of(mamba_lm())[0])
    inputs = torch.randn(2, 5, model[0].hidden_size)
    found = LatimLogit(model).decompose(inputs, target=(3, 1))
    (layer,) = record(model, inputs)
    assert relative_error(found.layers[0], all_vectors(layer)[:, 3, :, 1]) <= 1e-5
    assert found.embedding.shape == (2, 5) and not found.embedding.any()
    assert (
        (found.tokens.sum(-1) + found.bias - model(inputs)[:, 3, 1]) / total(found)
    ).abs().max() <= 1e-6


def test_a_frozen_end_is_refused() -> None:
    model = mamba_lm()
    ends = LatimLogit(lambda ids: model(ids).logits.softmax(-1), model=model)
    with pytest.raises(GradientModeError, match="softmax"):
        ends.attribute(token_ids(), **TARGET)
