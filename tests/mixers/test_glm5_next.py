"""GLM-5.3-Flash's attention to what an indexer picks, and its whole model of several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.hybrid_checks import check, record
from oracles import relative_error, times
from torch import Tensor

from captum_ssm import LatimALTI, LatimFlow
from captum_ssm.errors import InputError

pytest.importorskip("transformers")

from zoo.delta import Family

pytestmark = pytest.mark.slow

#: The third layer reads what the second one's indexer picks.
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "dense", "sparse", "dense"],
}


def make(patch: pytest.MonkeyPatch, kind: str = "sdpa", **options: Any) -> Any:
    model = Family("glm5_next", patch).model(**options)
    model.set_attn_implementation(kind)
    return model


def attention_of(model: Any, ids: Tensor, mask: Tensor | None = None) -> list[Any]:
    layers = record(model, ids, attention_mask=mask)
    return [layer for layer in layers if hasattr(model.get_submodule(layer.name), "indexer")]


def padded(tokens: int = 11) -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, :4] = 0
    return torch.randint(3, 15, (2, tokens)), mask


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_reads_what_is_picked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = padded()
    model = make(monkeypatch, kind, **SHARED)
    own, shared = attention_of(model, ids, mask)
    for layer in (own, shared):
        check(layer)
        matrices = layer.operator.dense("heads")
        assert not matrices.triu(1).any() and not matrices[1, :, :, :4].any()
        # of 11 tokens at most 4, and the beginning of the pool that the query stands in
        assert int((matrices[0] > 0).sum(-1).max()) <= 5
        assert torch.equal(layer.linear.mask, mask.bool())
    picked = [layer.operator.dense("heads")[0, 0] > 0 for layer in (own, shared)]
    assert torch.equal(*picked)


def test_tokens_that_nobody_reads_are_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one completes a pool that is not picked, and is read by nobody after it."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = make(monkeypatch, layer_types=["full_attention"], num_hidden_layers=1,
                     mlp_layer_types=["dense"], indexer_types=["full"])  # fmt: skip
        ids = torch.randint(3, 15, (1, 12))
        (layer,) = record(model, ids)
        if not layer.operator.dense("heads")[0, :, -1, -1].any():
            break
    else:
        raise AssertionError("every last token read itself")
    assert layer.linear.mask is None
    own = LatimFlow(model).attribute(ids, target=(-1, 3), per_token=True)[0]
    assert own[-1] != 0


def test_half_precision_picks_what_the_model_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(monkeypatch).to(torch.bfloat16)
    (layer,) = attention_of(model, padded(40)[0])
    assert layer.linear.values.dtype == torch.float32
    check(layer, 3e-2)


def test_matrices_move_values(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = attention_of(make(monkeypatch).double(), *padded())
    linear = layer.linear
    found = times(linear.operator.dense(None), linear.values) + linear.bias
    assert relative_error(linear.project(found), linear.output()) <= 1e-12


@pytest.mark.parametrize("rule", ["frozen", "half", "centred"])
def test_streams_add_up(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to several streams, and mixed among them, is all of the output."""
    ids, mask = padded()
    relevance, delta = LatimFlow(make(monkeypatch, **SHARED)).attribute(
        ids,
        target=(-1, 3),
        additional_forward_args=(mask,),
        rule=rule,
        return_convergence_delta=True,
    )
    assert delta.abs().max() <= 1e-5
    assert not relevance[mask == 0].any()


def test_methods_of_one_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="residual stream"):
        LatimALTI(make(monkeypatch)).attribute(padded()[0], target=(-1, 3))
