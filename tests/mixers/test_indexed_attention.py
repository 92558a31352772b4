"""GLM-5.3-Flash and Qwen4-Exp: attention to what an indexer picks, in models of several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.contract import check, record
from oracles import relative_error
from torch import Tensor
from zoo.delta import Family
from zoo.mamba import padded_batch

from captum_ssm import ImplicitAttentionRollout, LatimFlow

pytestmark = pytest.mark.slow

#: The third layer reads what the second one's indexer picks.
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "dense", "sparse", "dense"],
}


def made(family: str, patch: pytest.MonkeyPatch, kind: str = "sdpa", **options: Any) -> Any:
    model = Family(family, patch).model(**options)
    model.set_attn_implementation(kind)
    return model


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_glm_reads_what_is_picked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = padded_batch([11, 7])
    layers = record(
        made("glm5_next", monkeypatch, kind, **SHARED), ids.clamp_min(3), attention_mask=mask
    )
    for layer in layers:
        check(layer)
    attention = [layer for layer in layers if hasattr(layer.mixer.module, "indexer")]
    for layer in attention:
        matrices = layer.operator.dense("heads")
        assert not matrices.triu(1).any() and not matrices[1, :, :, :4].any()
        # of 11 tokens at most 4, and the beginning of the pool that the query stands in
        assert int((matrices[0] > 0).sum(-1).max()) <= 5
        assert torch.equal(layer.linear.mask, mask.bool())
    picked = [layer.operator.dense("heads")[0, 0] > 0 for layer in attention]
    assert torch.equal(*picked)


def test_tokens_that_nobody_reads_are_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one completes a pool that is not picked, and is read by nobody after it."""
    one = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    one |= {"mlp_layer_types": ["dense"], "indexer_types": ["full"]}
    for seed in range(20):
        torch.manual_seed(seed)
        model, ids = made("glm5_next", monkeypatch, **one), torch.randint(3, 15, (1, 12))
        (layer,) = record(model, ids)
        if not layer.operator.dense("heads")[0, :, -1, -1].any():
            break
    else:
        raise AssertionError("every last token read itself")
    assert layer.linear.mask is None
    own = LatimFlow(model).attribute(ids, target=(-1, 3), per_token=True)[0]
    assert own[-1] != 0


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_qwen_reads_what_the_indexer_chose(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens at most, in pairs, and those of a pair that is not complete."""
    model = made("qwen4_exp", monkeypatch, kind)
    for options in ({}, {"output_gate_type": "silu"}):
        for layer in record(
            made("qwen4_exp", monkeypatch, kind, **options), torch.randint(3, 19, (2, 13))
        ):
            check(layer)
    layer = record(model, torch.randint(3, 19, (2, 13)))[1]
    read = (layer.operator.dense(None) != 0).any(1).sum(-1)
    assert read.tolist() == [[1, 2, 3, 4, 5, *(4, 5) * 4]] * 2
    model.model.layers[1].self_attn.indexer.index_qk_proj.weight.data.zero_()  # all are alike
    ids, mask = padded_batch([20, 13])
    layer = record(model, ids, attention_mask=mask)[1]
    unread = (layer.operator.dense(None) == 0).all(1).all(-2)
    assert bool(unread[0].any()), "one pair of tokens is read by everyone"
    assert torch.equal(layer.linear.mask, mask.bool())


def test_the_rollout_of_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without n-grams: the product over layers of the matrices and the stream they are added to."""
    model, ids = made("qwen4_exp", monkeypatch), torch.randint(3, 19, (2, 9))
    product: Tensor = torch.eye(9).double()
    for layer in record(model, ids):
        product = (torch.eye(9).double() + layer.operator.dense().double()) @ product
    found = ImplicitAttentionRollout(model).attribute(ids)
    assert relative_error(found.double(), product[:, -1]) <= 1e-5
