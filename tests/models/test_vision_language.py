"""Whole vision-language models of transformers, given texts, and texts with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.sessions import thorough
from torch import Tensor
from zoo.vision_language import FAMILIES, IMAGE, vision_language_model

from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaAttribution, MambaLRP, trace

#: Norms and rotations are computed in float32 whatever the model is in.
FLOAT32 = 1e-5

every = pytest.mark.parametrize("family", thorough(FAMILIES, ("qwen3_5", "lfm2_vl")))


def padded_text(tokens: int = 7, padding: int = 3) -> tuple[Tensor, Tensor]:
    ids, mask = torch.randint(3, IMAGE, (2, tokens)), torch.ones(2, tokens, dtype=torch.long)
    mask[0, :padding] = 0
    return ids, mask


def on_text(model: Any) -> Any:
    return lambda ids, mask: model(input_ids=ids, attention_mask=mask)


@every
def test_a_text_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision_language_model(family, monkeypatch)
    (ids, mask), target = padded_text(), (-1, 5)
    with torch.no_grad(), trace(model) as record:
        model(input_ids=ids, attention_mask=mask)
    assert [layer.reconstruction_error() < FLOAT32 for layer in record.layers] == [True, True]
    for method in (LatimFlow, MambaLRP):
        relevance, delta = method(on_text(model)).attribute(
            ids, target, mask, return_convergence_delta=True
        )
        assert delta.abs().max() <= FLOAT32
        assert not relevance[0, :3].any() and relevance[0, 3:].all()
        alone = method(on_text(model)).attribute(ids[:1, 3:], target, mask[:1, 3:])
        assert torch.allclose(relevance[:1, 3:], alone, atol=FLOAT32)
    inner = [mixer.name for mixer in record.layers]
    for fold in (ImplicitAttentionRollout, MambaAttribution):
        found = fold(on_text(model)).attribute(ids, target=target, additional_forward_args=mask)
        chosen = fold(on_text(model), layers=inner)
        wanted = chosen.attribute(ids, target=target, additional_forward_args=mask)
        assert torch.allclose(found, wanted, atol=FLOAT32)
        assert not found[0, :3].any() and found[0, 3:].any()


def test_a_text_that_is_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision_language_model("qwen3_5", monkeypatch, "ForSequenceClassification")
    ids, mask = padded_text()
    relevance, delta = LatimFlow(on_text(model)).attribute(
        ids, 1, mask, return_convergence_delta=True
    )
    assert delta.abs().max() <= FLOAT32
    assert not relevance[0, :3].any() and relevance[0, 3:].all()
