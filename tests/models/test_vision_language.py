"""Whole vision-language models of transformers, given texts, and texts with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.sessions import thorough
from torch import Tensor
from zoo.vision_language import FAMILIES, IMAGE, Pictured, pictured, vision_language_model

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


# --- texts with images ---------------------------------------------------------------------------

#: Grids of the images of each text: of one alone, and of both, of several sizes.
GRIDS = {"one": [[(4, 4)], []], "several": [[(2, 4), (4, 2)], [(2, 2)]]}

with_images = pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
TARGET = (-1, 5)


def flow(model: Any, given: Pictured, method: Any = LatimFlow, **options: Any) -> Any:
    """Relevance of a text and its images together, and what is left."""
    return method(given.of(model), model).attribute(
        (given.ids, given.pixels),
        TARGET,
        tuple(given.others.values()),
        return_convergence_delta=True,
        **options,
    )


@every
@with_images
def test_the_towers_adapters(family: str, grids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = vision_language_model(family, monkeypatch), pictured(family, grids)
    with torch.no_grad(), trace(model) as record:
        given.of(model)(given.ids, given.pixels, *given.others.values())
    tower = record.layers[:2]
    assert all("vision" in each.name or "visual" in each.name for each in tower)
    assert all(layer.reconstruction_error() <= 1e-11 for layer in tower)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad(), trace(model, verify=True) as record:
            given.of(model)(given.ids, given.pixels, *given.others.values())
        for layer in record.layers:
            layer.verify()


@every
@with_images
@pytest.mark.parametrize("rule", ["frozen", "half", "centred"])
def test_a_text_and_its_images(
    family: str, grids: Any, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = vision_language_model(family, monkeypatch), pictured(family, grids)
    (words, patches), delta = flow(model, given, rule=rule)
    assert words.shape == given.ids.shape and patches.shape == given.pixels.shape
    assert delta.shape == (2,) and delta.abs().max() <= FLOAT32
    assert not words[given.ids == IMAGE].any()  # an image stands in their place
    assert patches.flatten(1).any(1).all()
    for example in (0, 1):
        one = given.alone(example)
        if not len(one.images):
            continue
        (own, shown), _ = flow(model, one, rule=rule)
        real = given.others["attention_mask"][example].bool()
        assert torch.allclose(words[example, real], own[0], atol=FLOAT32)
        assert torch.allclose(patches[given.of_pixels == example], shown, atol=FLOAT32)
    with torch.no_grad():
        output = given.of(model)(given.ids, given.pixels, *given.others.values()).logits
    found = LatimFlow(given.of(model), model).decompose(
        (given.ids, given.pixels),
        TARGET,
        tuple(given.others.values()),
        rule=rule,
        roles=rule == "centred",
    )
    assert torch.allclose(found.output, output[:, -1, 5])
    shares = torch.stack([found.tokens.sum(1), found.by_others, found.bias])
    assert torch.allclose(shares.sum(0), found.output, atol=FLOAT32)
    own = torch.stack([patches[given.of_pixels == example].sum() for example in (0, 1)])
    assert torch.allclose(found.by_others, own, atol=FLOAT32)
    if found.roles is not None:
        assert torch.allclose(torch.stack(list(found.roles.values())).sum(0), words, atol=FLOAT32)
