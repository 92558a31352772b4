"""AMPLIFY with a bundled classifier as the proxy: which words a method puts into the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from captum_ssm import LatimFlow
from captum_ssm.metrics import Demonstration, amplify_prompt, hardest_examples, key_words
from captum_ssm_bench import load_bundled
from captum_ssm_bench.training.text_recipes import TEXT_RECIPES

#: Sentences and their labels; the last two are of a mind that their words alone do not show.
SENTENCES = (
    ("a wonderful film with brilliant actors .", 1),
    ("boring , stupid and far too long .", 0),
    ("not one moment of it is boring , stupid or dull .", 1),
    ("i wish it were as wonderful and brilliant as they say .", 0),
)
LABELS = ("negative", "positive")


@pytest.fixture(params=["valence-mamba", "valence-bert"])
def proxy(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A classifier and how it reads."""
    model, vocabulary = load_bundled(request.param)
    return model, TEXT_RECIPES[request.param].reader(vocabulary)


def prompt_of(model: Any, reader: Any, count: int) -> tuple[str, list[Demonstration]]:
    """The paper's steps: the hardest examples, their key words by a method, the prompt."""
    texts = [sentence.split() for sentence, _ in SENTENCES]
    labels = [label for _, label in SENTENCES]
    with torch.no_grad():
        logits = reader.logits(model, reader.ids(texts))
    shown = []
    for index in hardest_examples(logits, labels, count).tolist():
        ids = reader.ids([texts[index]])
        told = reader.classes[labels[index]]
        target = told if reader.encoder else (int(reader.mark(ids)), told)
        relevance = LatimFlow(model).attribute(ids, target)[0]
        words = key_words(texts[index], relevance[reader.words(ids)[0]], 2)
        shown.append(Demonstration(" ".join(texts[index]), words, LABELS[labels[index]]))
    return amplify_prompt(shown, "a dull plot ."), shown


def test_the_prompt_has_the_papers_form_and_is_the_same_again(proxy: tuple[Any, Any]) -> None:
    prompt, shown = prompt_of(*proxy, count=2)
    assert {each.text for each in shown} == {sentence for sentence, _ in SENTENCES[2:]}
    parts = [
        f"{each.text}\nThe key words: {', '.join(each.words)} are crucial clues for predicting "
        f"{each.label} as the correct answer.\nAnswer: {each.label}"
        for each in shown
    ]
    assert prompt == "\n\n".join([*parts, "a dull plot .\nAnswer:"])
    assert prompt_of(*proxy, count=2)[0] == prompt


def test_key_words_are_those_that_speak_for_the_label(proxy: tuple[Any, Any]) -> None:
    _, shown = prompt_of(*proxy, count=4)
    words = {each.text: set(each.words) for each in shown}
    assert words[SENTENCES[0][0]] == {"wonderful", "brilliant"}
    assert words[SENTENCES[1][0]] == {"boring", "stupid"}
