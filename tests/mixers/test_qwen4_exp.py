"""Qwen4-Exp as a whole: two streams, an indexer before attention, and embeddings of n-grams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from helpers.versions import transformers5
from oracles import relative_error
from torch import Tensor
from zoo.delta import N_GRAMS, Family
from zoo.mamba import padded_batch

from captum_ssm import (
    Edges,
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    MambaAttribution,
    knock_out,
    trace,
)
from captum_ssm.errors import InputError

pytestmark = [transformers5, pytest.mark.slow]

FLOAT32 = 1e-5  # for any draw; typical is 2e-7


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    return Family("qwen4_exp", monkeypatch)


@pytest.mark.parametrize("options", [{}, N_GRAMS, {"output_gate_type": "silu"}])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layer(family: Family, attention: str, options: dict[str, Any]) -> None:
    model = family.model(**options)
    model.set_attn_implementation(attention)
    ids, mask = padded_batch([13, 8])
    layers = hybrid.record(model, ids, attention_mask=mask)
    kinds = [type(layer.mixer.module).__name__.removeprefix("Qwen4ExpText") for layer in layers]
    assert kinds == ["GatedDeltaNet", "Attention", "GatedDeltaNet"]
    for layer in layers:
        hybrid.check(layer, FLOAT32)
    hybrid.check_same_logits(model, ids, attention_mask=mask)


def test_attention_reads_what_the_indexer_chose(family: Family) -> None:
    """Four tokens at most, in pairs, and those of a pair that is not complete."""
    layer = hybrid.record(family.model(), torch.randint(3, 19, (2, 13)))[1]
    read = (layer.operator.dense(None) != 0).any(1).sum(-1)
    assert read.tolist() == [[1, 2, 3, 4, 5, *(4, 5) * 4]] * 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_nobody_reads_is_no_padding(family: Family, attention: str) -> None:
    model = family.model()
    model.set_attn_implementation(attention)
    model.model.layers[1].self_attn.indexer.index_qk_proj.weight.data.zero_()  # all are alike
    ids, mask = padded_batch([20, 13])
    layer = hybrid.record(model, ids, attention_mask=mask)[1]
    unread = (layer.operator.dense(None) == 0).all(1).all(-2)
    assert bool(unread[0].any()), "one pair of tokens is read by everyone"
    assert torch.equal(layer.linear.mask, mask.bool())


@pytest.mark.parametrize("padded", [False, True])
def test_what_n_grams_add_is_no_tokens(family: Family, padded: bool) -> None:
    """Everything adds up to the logit, with the biases that the first block brings in."""
    model = family.model(**N_GRAMS).double()
    ids, mask = padded_batch([9, 6])
    found = LatimFlow(model).decompose(
        ids, (-1, 3), additional_forward_args=(mask if padded else torch.ones_like(mask),)
    )
    assert bool((found.delta.abs() <= 1e-5 * found.output.abs().clamp_min(1e-2)).all())
    added = sum(found.biases.values())
    assert relative_error(found.tokens.sum(1) + added, found.output) <= 1e-5
    assert bool(found.biases["model.layers.0"].any())
    assert bool((found.tokens[mask == 0] == 0).all()) or not padded


@pytest.mark.parametrize("method", [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution])
def test_folds_name_the_convolution_of_n_grams(family: Family, method: Any) -> None:
    model, ids = family.model(**N_GRAMS), torch.randint(3, 19, (1, 9))
    with pytest.raises(InputError, match=r"mixed in module 'model\.layers\.0\.ple\.conv1d'"):
        if method is MambaAttribution:
            method(model).attribute(ids, (-1, 3))
        else:
            method(model).attribute(ids)


def test_single_edges_behind_n_grams_are_refused(family: Family) -> None:
    model, ids = family.model(**N_GRAMS), torch.randint(3, 19, (1, 9))
    edges = Edges("model.layers.2.linear_attn", [1], [5])
    with pytest.raises(InputError, match="cannot be followed"), knock_out(model, edges):
        model(ids)


def test_the_rollout_of_two_streams(family: Family) -> None:
    """Without n-grams: the product over layers of the matrices and the stream they are added to."""
    model, ids = family.model(), torch.randint(3, 19, (2, 9))
    with torch.no_grad(), trace(model) as t:
        model(ids)
    product: Tensor = torch.eye(9).double()
    for layer in t.layers:
        product = (torch.eye(9).double() + layer.operator.dense().double()) @ product
    found = ImplicitAttentionRollout(model).attribute(ids)
    assert relative_error(found.double(), product[:, -1]) <= FLOAT32


def test_half_precision(family: Family) -> None:
    """The indexer picks in the model's own precision, and all else is computed in float32."""
    model = family.model().to(torch.bfloat16)
    ids, mask = padded_batch([20, 13])
    for layer in hybrid.record(model, ids, attention_mask=mask):
        hybrid.check_half(layer, 5e-2)
