"""Whole vision-language models of transformers, given texts, and texts with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.vision_language import FAMILIES, IMAGE, SEEING, Pictured, pictured, vision_language_model

from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaAttribution, MambaLRP, trace
from captum_ssm.errors import InputError, OptionError, UnsupportedMixerError
from captum_ssm.tracing import find_mixers

#: Norms and rotations are computed in float32 whatever the model is in.
FLOAT32 = 1e-5

#: Of pools of tokens that score alike they pick others where there is padding.
PICKS = ("glm5_next",)

pytestmark = pytest.mark.slow

every_seeing = pytest.mark.parametrize("family", SEEING)


def padded_text(tokens: int = 7, padding: int = 3) -> tuple[Tensor, Tensor]:
    ids, mask = torch.randint(3, IMAGE, (2, tokens)), torch.ones(2, tokens, dtype=torch.long)
    mask[0, :padding] = 0
    return ids, mask


def on_text(model: Any) -> Any:
    return lambda ids, mask: model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("family", FAMILIES)
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
        assert family in PICKS or torch.allclose(relevance[:1, 3:], alone, atol=FLOAT32)
    inner = [mixer.name for mixer in record.layers]
    for fold in (ImplicitAttentionRollout, MambaAttribution):
        found = fold(on_text(model)).attribute(ids, target=target, additional_forward_args=mask)
        chosen = fold(on_text(model), layers=inner)
        wanted = chosen.attribute(ids, target=target, additional_forward_args=mask)
        assert torch.allclose(found, wanted, atol=FLOAT32)
        assert not found[0, :3].any() and found[0, 3:].any()


#: Grids of the images of each text: of one alone, and of both, of several sizes.
GRIDS = {"one": [[(4, 4)], []], "several": [[(2, 4), (4, 2)], [(2, 2)]]}

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


@every_seeing
@pytest.mark.parametrize(("grids", "rule"), [("one", "centered"), ("several", "frozen")])
def test_a_text_and_its_images(
    family: str, grids: str, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = vision_language_model(family, monkeypatch), pictured(family, GRIDS[grids])
    (words, patches), delta = flow(model, given, rule=rule)
    assert words.shape == given.ids.shape and patches.shape == given.pixels.shape
    assert delta.shape == (2,) and delta.abs().max() <= FLOAT32
    assert not words[given.ids == IMAGE].any()  # an image stands in their place
    assert patches.flatten(1).any(1).all()
    for example in (0, 1):
        one = given.alone(example)
        if family in PICKS or not len(one.images):
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
        roles=rule == "centered",
    )
    assert torch.allclose(found.output, output[:, -1, 5], atol=FLOAT32)
    shares = torch.stack([found.tokens.sum(1), found.by_others, found.bias])
    assert torch.allclose(shares.sum(0), found.output, atol=FLOAT32)
    own = torch.stack([patches[given.of_pixels == example].sum() for example in (0, 1)])
    assert torch.allclose(found.by_others, own, atol=FLOAT32)
    if found.roles is not None:
        assert torch.allclose(torch.stack(list(found.roles.values())).sum(0), words, atol=FLOAT32)


class Merged:
    """What a vision-language model's text reads, its images' features in their places."""

    def __init__(self, model: Any, given: Pictured) -> None:
        self.model, self.given = model, given
        text = model.model.language_model
        handle = text.register_forward_pre_hook(self._note, with_kwargs=True)
        with torch.no_grad():
            given.of(model)(given.ids, given.pixels, *given.others.values())
        handle.remove()

    def _note(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.embeddings = kwargs["inputs_embeds"]
        self.more = {name: kwargs.get(name) for name in ("attention_mask", "position_ids")}

    def __call__(self, embeddings: Tensor) -> Tensor:
        text = self.model.model.language_model(inputs_embeds=embeddings, **self.more)
        return self.model.lm_head(text.last_hidden_state)


@every_seeing
def test_a_text_whose_images_are_given(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As constants to LatimFlow; to folds as tokens like others, where the layers are named."""
    model, given = vision_language_model(family, monkeypatch), pictured(family, GRIDS["several"])
    merged, more = Merged(model, given), (given.pixels, *given.others.values())
    (words, _), _ = flow(model, given)
    alone, delta = LatimFlow(given.of(model), model).attribute(
        given.ids, TARGET, more, return_convergence_delta=True
    )
    assert torch.allclose(alone, words, atol=FLOAT32) and delta.abs().max() <= FLOAT32
    text = [mixer.name for mixer in find_mixers(model) if "language" in mixer.name]
    for fold in (ImplicitAttentionRollout, MambaAttribution):
        with pytest.raises(InputError, match=r"attn' does not read .* with layers=\[...\]"):
            fold(given.of(model), model).attribute(
                given.ids, target=TARGET, additional_forward_args=more
            )
        found = fold(given.of(model), model, layers=text).attribute(
            given.ids, target=TARGET, additional_forward_args=more
        )
        wanted = fold(merged, model, layers=text).attribute(
            merged.embeddings, target=TARGET, per_token=True
        )
        assert torch.allclose(found, wanted, atol=FLOAT32)
        assert found[given.ids == IMAGE].any()


def test_a_tower_without_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused where it sees an image; a text alone is explained."""
    model, given = vision_language_model("lfm3_vl", monkeypatch), pictured("lfm3_vl", GRIDS["one"])
    message = r"vision_tower\.layers\.0\.conv' of class .* has no adapter, and it ran.*layers="
    with pytest.raises(UnsupportedMixerError, match=message):
        flow(model, given)


def test_options_of_several_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision_language_model("lfm2_vl", monkeypatch)
    given = pictured("lfm2_vl", GRIDS["several"])
    method, more = LatimFlow(given.of(model), model), tuple(given.others.values())
    both = given.ids, given.pixels
    (words, patches), delta = flow(model, given, per_token=True)
    whole = flow(model, given)[0]
    assert torch.equal(patches, whole[1].sum(-1)) and torch.equal(words, whole[0])
    again = method.compute_convergence_delta(whole, both, TARGET, more)
    assert torch.allclose(again, delta, atol=1e-9)
    less = method.compute_convergence_delta((whole[0], 0 * whole[1]), both, TARGET, more)
    assert torch.allclose(less.sum() - delta.sum(), whole[1].sum())
    # in comparison with other patches
    (_, other), rest = flow(model, given, baselines=(None, given.pixels / 2))
    assert torch.allclose(other, whole[1] / 2) and rest.abs().max() <= FLOAT32
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"baselines": 0.5}, OptionError, "baselines is 0.5, but inputs holds 2 tensors"),
        ({"baselines": (None, "a")}, OptionError, r"baselines='a' cannot replace inputs\[1\]"),
        ({"internal_batch_size": 1}, OptionError, "internal_batch_size=1 cannot split"),
    ]
    for options, error, message in refused:
        with pytest.raises(error, match=message):
            method.attribute(both, TARGET, more, **options)
    with pytest.raises(InputError, match=r"inputs\[1\] is a tensor of dtype torch.int64 .* order"):
        method.attribute(both[::-1], TARGET, more)
    with pytest.raises(
        InputError, match=r"2 tensors, .* LatimFlow or MambaLRP, which explain several"
    ):
        ImplicitAttentionRollout(given.of(model), model).attribute(both)
