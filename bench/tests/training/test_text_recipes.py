"""Classifiers of texts: how they are made, that they learn, and what the shipped ones do."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers.valence_texts import needs_real_texts, rated_texts, write_folder

from captum_ssm.errors import OptionError
from captum_ssm_bench.cli import main

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm.models import CLASS_WORDS, TextReader, WordVocabulary
from captum_ssm_bench import load_bundled
from captum_ssm_bench.bundled import weights_of
from captum_ssm_bench.data import load_valence
from captum_ssm_bench.data.valence import VARIABLE
from captum_ssm_bench.training import recipes
from captum_ssm_bench.training.loop import fit, train_model
from captum_ssm_bench.training.text_recipes import (
    TEXT_RECIPES,
    ClassifierSize,
    RatedTexts,
    TextRecipe,
    alike,
    bag_logits,
    class_accuracy,
    class_weights,
    rating_loss,
)

ARCHITECTURES = ("mamba", "rwkv", "bert")
TINY = RatedTexts(least=2)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hundred sentences; two words of each that is not neutral tell its class."""
    folder = write_folder(tmp_path / "texts", rated_texts(100, random.Random(random.random())))
    monkeypatch.setenv(VARIABLE, str(folder))


def recipe(architecture: str, steps: tuple[int, ...], **changes: Any) -> TextRecipe:
    size = ClassifierSize(architecture, layers=2, hidden=16)
    return TextRecipe(TINY, size, steps, batch_size=16, bag_size=16, **changes)


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_class_weights_are_opposites_and_stay_so(architecture: str, made_up: None) -> None:
    made = replace(recipe(architecture, (3, 3)), task=RatedTexts(least=2))
    model = train_model(made, log=silent)
    reader = made.reader(made.task.vocabulary)
    told = class_weights(model)[list(reader.classes)]
    torch.testing.assert_close(told[0], -told[1], rtol=0, atol=1e-6)
    fresh = made.new()
    assert not torch.allclose(class_weights(fresh)[reader.classes[1]], told[1], atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_words_then_the_model_are_learned(architecture: str, made_up: None, seed: int) -> None:
    made = recipe(architecture, (60, 80), learning_rate=1e-2, words_rate=2e-2, hidden_words=0.1)
    made = replace(made, task=RatedTexts(least=2))
    lines: list[str] = []
    model = train_model(made, seed, log=lines.append)
    assert [line.split()[1] for line in lines] == ["60/60", "80/80"]
    reader, test = made.reader(made.task.vocabulary), made.task.texts("test")
    known = [*test, *made.task.texts("train")]
    assert class_accuracy(lambda ids: bag_logits(model, reader, ids), reader, known) >= 0.8
    assert class_accuracy(lambda ids: reader.logits(model, ids), reader, known) >= 0.8
    scores = made.measure(model)
    assert set(scores) == {"movies", "tweets", "products", "editorials", "all"}
    whole = class_accuracy(lambda ids: reader.logits(model, ids), reader, test)
    assert scores["all"]["accuracy"] == pytest.approx(whole)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_command_makes_a_model_that_loads_again(
    architecture: str,
    made_up: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"valence-{architecture}"
    made = replace(recipe(architecture, (2, 2)), task=RatedTexts(least=2))
    monkeypatch.setitem(recipes.RECIPES, name, made)
    assert main(f"train {name} --out {tmp_path / 'out'} --seed 3 --layers 3".split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[:2]] == ["2/2", "2/2"]
    assert [line.partition(":")[0] for line in printed[2:]][-1] == "all"
    model, vocabulary = load_bundled(name, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "vocab.json",
    }
    loaded: Any = model
    assert loaded.config.num_hidden_layers == 3 and not model.training
    assert vocabulary.vocab == made.task.vocabulary.vocab
    changed = replace(made, size=replace(made.size, layers=3))
    again = train_model(changed, 3, log=silent)
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_loss_is_that_of_the_rated_chances(made_up: None) -> None:
    texts = TINY.texts("train")[:5]
    logits = torch.randn(5, 2, dtype=torch.float64)
    expected = 0.0
    for row, text in zip(logits.tolist(), texts, strict=True):
        chance = 1 / (1 + math.exp(-text.valence))
        said = 1 / (1 + math.exp(row[0] - row[1]))
        expected -= chance * math.log(said) + (1 - chance) * math.log(1 - said)
    assert rating_loss(logits, texts).item() == pytest.approx(expected / 5)


def test_a_bag_is_the_sum_of_its_words(made_up: None) -> None:
    made = replace(recipe("mamba", (1, 1)), task=RatedTexts(least=2))
    model: Any = made.new()
    reader = made.reader(made.task.vocabulary)
    texts = [text.words for text in made.task.texts("train")[:4]]
    found = bag_logits(model, reader, reader.ids(texts))
    for row, words in zip(found.detach(), texts, strict=True):
        ids = torch.tensor([made.task.vocabulary.id_of(word) for word in words])
        for told, word in zip(row, CLASS_WORDS, strict=True):
            weight = model.lm_head.weight[made.task.vocabulary.id_of(word)]
            sums = sum((model.backbone.embeddings.weight[i] @ weight).item() for i in ids)
            assert float(told) == pytest.approx(2 * sums / len(words) ** 0.5, rel=1e-4, abs=1e-5)


def test_batches_hold_texts_of_nearly_one_length(made_up: None) -> None:
    texts = TINY.texts("train")
    drawn = alike(texts, 5, random.Random(0))
    spans, all_lengths = [], [len(text.words) for text in texts]
    seen = set()
    for _ in range(len(texts) // 5):
        batch = next(drawn)
        assert len(batch) == 5
        lengths = [len(text.words) for text in batch]
        spans.append(max(lengths) - min(lengths))
        seen |= {text.name for text in batch}
    assert sum(spans) / len(spans) < (max(all_lengths) - min(all_lengths)) / 2
    assert len(seen) > len(texts) / 2


def test_hidden_words_are_words(made_up: None) -> None:
    made = replace(recipe("bert", (1, 1), hidden_words=0.5), task=RatedTexts(least=2))
    reader = made.reader(made.task.vocabulary)
    ids = reader.ids([text.words for text in made.task.texts("train")])
    hidden = made._hidden(reader, ids)
    changed = hidden != ids
    assert (hidden[changed] == made.task.vocabulary.id_of("<unk>")).all()
    assert not changed[~reader.words(ids)].any()
    known = reader.words(ids) & (ids != made.task.vocabulary.id_of("<unk>"))
    share = float(changed[known].double().mean())
    assert abs(share - 0.5) < 5 * (0.25 / int(known.sum())) ** 0.5


def test_one_number_of_steps_is_for_both_rounds(made_up: None) -> None:
    made = replace(recipe("bert", (2,)), task=RatedTexts(least=2))
    assert [part.steps for part in made.rounds(made.new(), 0)] == [2, 2]


def test_the_second_round_leaves_the_words(made_up: None) -> None:
    made = replace(recipe("bert", (2, 3)), task=RatedTexts(least=2))
    model: Any = made.new()
    _, second = made.rounds(model, 0)
    before = model.bert.embeddings.word_embeddings.weight.clone()
    fit(model, second, log=silent)
    torch.testing.assert_close(model.bert.embeddings.word_embeddings.weight, before)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(OptionError, match=r"architecture='gru' is not known.*'rwkv'"):
        ClassifierSize("gru")


# --- the shipped models --------------------------------------------------------------------------

CLASSES = {
    "valence-mamba": "MambaForCausalLM",
    "valence-rwkv": "RwkvForCausalLM",
    "valence-bert": "BertForSequenceClassification",
}


@pytest.fixture(params=TEXT_RECIPES)
def shipped(request: pytest.FixtureRequest) -> tuple[str, Any, TextReader]:
    name = str(request.param)
    model, vocabulary = load_bundled(name)
    return name, model, TEXT_RECIPES[name].reader(vocabulary)


@pytest.fixture
def card(shipped: tuple[str, Any, TextReader]) -> str:
    return " ".join((weights_of(shipped[0]).parent / "README.md").read_text("utf-8").split())


def test_shipped_files(shipped: tuple[str, Any, TextReader]) -> None:
    name, model, reader = shipped
    folder = weights_of(name).parent
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "vocab.json",
    }
    assert weights_of(name).stat().st_size <= 2_000_000
    assert type(model).__name__ == CLASSES[name] and not model.training
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    size = TEXT_RECIPES[name].size
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (size.layers, size.hidden)
    assert model.config.vocab_size == len(reader.vocabulary)
    told = class_weights(model)[list(reader.classes)]
    torch.testing.assert_close(told[0], -told[1], rtol=0, atol=1e-5)


def test_the_card_says_how_the_model_is_made(
    shipped: tuple[str, Any, TextReader], card: str
) -> None:
    name, model, reader = shipped
    count = f"{sum(p.numel() for p in model.parameters()):,}".replace(",", " ")
    made = TEXT_RECIPES[name]
    assert card.startswith(f"# {name} ") and f'load_bundled("{name}")' in card
    assert f"{count} parameters" in card and f"{len(reader.vocabulary)} words" in card
    assert f"{made.size.layers} layers, hidden size {made.size.hidden}" in card
    assert all(f"{steps} steps" in card for steps in made.steps)


def test_plain_sentences_are_told(shipped: tuple[str, Any, TextReader]) -> None:
    _, model, reader = shipped
    texts = [
        "a wonderful , touching and beautiful film with excellent actors .",
        "an awful , boring and stupid mess with terrible actors .",
        "i love this phone , it works great :)",
        "worst camera ever , a horrible waste of money :(",
    ]
    with torch.no_grad():
        told = reader.logits(model, reader.ids([text.split() for text in texts])).argmax(-1)
    assert told.tolist() == [1, 0, 1, 0]


def test_padding_changes_nothing(shipped: tuple[str, Any, TextReader]) -> None:
    _, model, reader = shipped
    texts = [["good"], ["a", "dull", ",", "dull", "mess", "and", "nobody", "cares"]]
    with torch.no_grad():
        together = reader.logits(model, reader.ids(texts))
        alone = torch.cat([reader.logits(model, reader.ids([words])) for words in texts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@needs_real_texts
def test_accuracy_on_texts_held_out(shipped: tuple[str, Any, TextReader], card: str) -> None:
    _, model, reader = shipped
    assert reader.vocabulary.vocab == RatedTexts().vocabulary.vocab
    right = count = 0
    for source in RatedTexts().sources:
        texts = load_valence(sources=[source])
        found = class_accuracy(lambda ids: reader.logits(model, ids), reader, texts)
        assert f"| `{source}` | {len(texts)} | {found:.3f} |" in card
        right, count = right + round(found * len(texts)), count + len(texts)
    assert f"| all | {count} | {right / count:.3f} |" in card
    assert right / count >= 0.8


def test_vocabularies_with_an_unknown_word() -> None:
    known = WordVocabulary(["<pad>", "<unk>", "good"])
    assert known.encode("good heavens") == [2, 1] and known.decode([2, 1]) == "good <unk>"
    assert "heavens" not in known
