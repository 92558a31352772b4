"""The shipped models do what their cards say, measured anew."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from bench_helpers.valence_texts import needs_real_texts
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("skimage")

from captum_ssm.models import load_dictionary
from captum_ssm.models.recall import generate
from captum_ssm.tracing import repaired_scans
from captum_ssm_bench import load_bundled
from captum_ssm_bench.bundled import weights_of
from captum_ssm_bench.tasks import SCENES, answer_accuracy, swap_check
from captum_ssm_bench.training.dictionary_recipes import (
    DICTIONARY_RECIPES,
    explained_share,
    rewritten,
)
from captum_ssm_bench.training.image_recipes import image_accuracy
from captum_ssm_bench.training.language_recipes import LANGUAGE_RECIPES, accuracy_by_length
from captum_ssm_bench.training.loop import RECIPES
from captum_ssm_bench.training.text_recipes import TEXT_RECIPES, RatedTexts, class_accuracy
from captum_ssm_bench.valence import load_valence

#: Their recurrences know no mask, and read padding as if it were words.
READ_PADDING = ("rwkv", "griffin")


class Card(NamedTuple):
    """Bounds of what a card tells, wide enough for a few hundred fresh texts.

    Attributes:
        tokens: least share of answered tokens.
        moved: least share of exchanged sources that are followed.
        strayed: greatest share of other tokens that change.
        hardest: least share of texts at each length.
        exchanged: texts whose sources are exchanged, fewer where each has many.
    """

    tokens: float = 0.99
    moved: float = 0.95
    strayed: float = 0.03
    hardest: float = 0.95
    exchanged: int = 96


CARDS = dict.fromkeys(LANGUAGE_RECIPES, Card()) | {
    "copying-mamba": Card(strayed=0.2, hardest=0.65, exchanged=24),
    "copying-mamba2": Card(hardest=0.82, exchanged=24),
    "passkey-mamba": Card(strayed=0.06),
    "two-passkeys-mamba": Card(strayed=0.2),
    "pairs-mamba": Card(tokens=0.96),
    "pairs-mamba2": Card(tokens=0.96),
    "pairs-rwkv": Card(tokens=0.96, hardest=0.94),
    "pairs-griffin": Card(tokens=0.9, moved=0.92, hardest=0.9),
    "copying-bamba": Card(strayed=0.15, hardest=0.93, exchanged=24),
    "passkey-gated-deltanet": Card(strayed=0.3),
    "two-passkeys-gated-deltanet": Card(strayed=0.25),
}
#: The least accuracy on a few hundred fresh scenes, a little below what the cards tell.
LEAST = {"scenes-vim": 0.86, "scenes-vim-first": 0.91, "scenes-vmamba": 0.84, "scenes-vit": 0.91}


@pytest.mark.parametrize("name", CARDS)
def test_language_models(name: str, seed: int) -> None:
    """They answer right at every length, from the sources that are known, padded or not."""
    model, vocabulary = load_bundled(name)
    card, task = CARDS[name], RECIPES[name].task
    assert vocabulary.vocab == task.vocabulary.vocab
    scores = accuracy_by_length(model, task, per_length=128, seed=seed)
    assert min(score.sequences for score in scores.values()) >= card.hardest
    assert sum(score.tokens for score in scores.values()) / len(scores) >= card.tokens
    padded = RECIPES[name].size.architecture not in READ_PADDING
    length = None if padded else task.longest
    check = swap_check(model, task.batch(task.draw(card.exchanged, seed, length)), seed)
    assert check.moved >= card.moved
    assert not check.strayed > card.strayed, "where there are other tokens"
    if padded:
        examples = [task.draw(1, seed + n, n)[0] for n in (task.shortest, task.longest)]
        batch = task.batch(examples)
        with torch.no_grad(), repaired_scans():
            both = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            for row, example in enumerate(examples):
                alone = model(input_ids=task.batch([example]).input_ids).logits[0]
                torch.testing.assert_close(both[row, -len(alone) :], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LEAST)
def test_image_classifiers(name: str, seed: int) -> None:
    model, classes = load_bundled(name)
    assert classes == SCENES.classes
    assert image_accuracy(model, SCENES.draw(512, seed)) >= LEAST[name]
    assert image_accuracy(model, SCENES.draw(1024, seed, held_out=False)) >= LEAST[name] + 0.01


@pytest.mark.parametrize("name", TEXT_RECIPES)
def test_plain_sentences_are_told(name: str) -> None:
    model, vocabulary = load_bundled(name)
    reader = TEXT_RECIPES[name].reader(vocabulary)
    told = (
        "a wonderful , touching and beautiful film with excellent actors .",
        "an awful , boring and stupid mess with terrible actors .",
        "i love this phone , it works great :)",
        "worst camera ever , a horrible waste of money :(",
    )
    texts = [text.split() for text in told]
    with torch.no_grad():
        together = reader.logits(model, reader.ids(texts))
        alone = torch.cat([reader.logits(model, reader.ids([words])) for words in texts])
    assert together.argmax(-1).tolist() == [1, 0, 1, 0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@needs_real_texts
@pytest.mark.parametrize("name", TEXT_RECIPES)
def test_accuracy_on_texts_held_out(name: str) -> None:
    model, vocabulary = load_bundled(name)
    assert vocabulary.vocab == RatedTexts().vocabulary.vocab
    reader, card = TEXT_RECIPES[name].reader(vocabulary), card_of(name)
    for source in RatedTexts().sources:
        texts = load_valence(sources=[source])
        found = class_accuracy(lambda ids: reader.logits(model, ids), reader, texts)
        assert f"| `{source}` | {len(texts)} | {found:.3f} |" in card


def card_of(name: str) -> str:
    return " ".join((weights_of(name).parent / "README.md").read_text("utf-8").split())


def test_the_dictionary(seed: int) -> None:
    model: nn.Module = load_bundled("recall-mamba")[0]
    dictionary, recipe = load_dictionary("recall-mamba"), DICTIONARY_RECIPES
    (made,) = recipe.values()
    x = made.outputs(model, 512, seed)
    active = dictionary.encode(x) > 0
    assert explained_share(dictionary, x) >= 0.96
    assert int(active.sum(-1).max()) <= made.size.k
    assert int((~active.any(0)).sum()) <= 0.25 * made.size.features
    batch = made.task.batch(generate(512, seed))
    with rewritten(model, made.layer, dictionary):
        assert answer_accuracy(model, batch).sequences >= 0.9
    with rewritten(model, made.layer, lambda each: x.mean(0).expand_as(each)):
        assert answer_accuracy(model, batch).sequences <= 0.4
