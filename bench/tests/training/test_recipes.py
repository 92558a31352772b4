"""Training: the same seed gives the same model, and the command makes models."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers.valence_texts import rated_texts, write_folder
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("skimage")

from captum_ssm.errors import OptionError
from captum_ssm.inside.dictionary import SparseAutoencoder
from captum_ssm_bench import load_bundled
from captum_ssm_bench.cli import main
from captum_ssm_bench.tasks import CopyingTask, SceneTask, answer_accuracy
from captum_ssm_bench.training import dictionary_recipes, image_recipes, loop
from captum_ssm_bench.training.dictionary_recipes import DictionaryRecipe, DictionarySize
from captum_ssm_bench.training.image_recipes import (
    ImageModelSize,
    ImageRecipe,
)
from captum_ssm_bench.training.language_recipes import LanguageRecipe
from captum_ssm_bench.training.loop import recipe_of, train, train_model
from captum_ssm_bench.training.recipe import Recipe
from captum_ssm_bench.training.small import ModelSize
from captum_ssm_bench.training.text_recipes import (
    ClassifierSize,
    RatedTexts,
    TextRecipe,
    bag_logits,
    class_accuracy,
    class_weights,
    rating_loss,
)
from captum_ssm_bench.valence import VARIABLE

COPIES = CopyingTask(symbols=3, shortest=1, longest=3)
TINY = SceneTask(size=16, lines=1)


def language(architecture: str = "mamba", **changes: Any) -> LanguageRecipe:
    size = ModelSize(architecture, layers=1, hidden=16, state=4, head_dim=8)
    return LanguageRecipe(COPIES, size, **{"steps": (2, 1), "batch_size": 4, **changes})


def image(architecture: Any, hidden: int = 16, **changes: Any) -> ImageRecipe:
    size = ImageModelSize(architecture, layers=1, hidden=hidden, state=2, patch=8)
    return ImageRecipe(TINY, size, **{"steps": (2, 1), "batch_size": 3, **changes})


def texts(architecture: str, **changes: Any) -> TextRecipe:
    size, task = ClassifierSize(architecture, layers=2, hidden=16), RatedTexts(least=2)
    given = {"steps": (2, 1), "batch_size": 16, "bag_size": 16, **changes}
    return TextRecipe(task, size, **given)


def dictionary() -> DictionaryRecipe:
    known = dictionary_recipes.DICTIONARY_RECIPES["recall-mamba-dictionary"]
    return replace(known, size=DictionarySize(16, 2), steps=(2, 1), texts=8, batch_size=32)


#: By the name of a bundled model or dictionary, a small recipe of its kind.
SMALL: dict[str, Callable[[], Recipe]] = {
    "copying-mamba": language,
    "copying-mamba2": lambda: language("mamba2"),
    "scenes-vim": lambda: image("vim"),
    "scenes-vmamba": lambda: image("vmamba"),
    "scenes-vit": lambda: image("vit", 24, mask_loss=1.0),
    "valence-mamba": lambda: texts("mamba"),
    "valence-rwkv": lambda: texts("rwkv"),
    "valence-bert": lambda: texts("bert"),
    "recall-mamba-dictionary": dictionary,
}


@pytest.fixture(autouse=True)
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hundred sentences, two words of each that is not neutral tell its class; and less to do.

    Few texts and scenes are measured, in training and after it.
    """
    folder = write_folder(tmp_path / "texts", rated_texts(100, random.Random(random.random())))
    monkeypatch.setenv(VARIABLE, str(folder))
    for module in (dictionary_recipes, image_recipes):
        monkeypatch.setattr(module, "_HELD_OUT", 8)
        monkeypatch.setattr(module, "_MEASURED", 8)


def silent(_: str) -> None:
    pass


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# --- all recipes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_the_command_makes_what_training_makes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same seed gives the same model, another seed another, and what is saved loads again."""
    known = loop.DICTIONARY_RECIPES if name.endswith("dictionary") else loop.RECIPES
    monkeypatch.setitem(known, name, SMALL[name]())
    threads, out = torch.get_num_threads(), tmp_path / "out"
    assert main(["train", name, "--out", str(out), "--seed", "5"]) == 0
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[:2]] == ["2/2", "1/1"]
    assert all(": " in line for line in printed[2:]) and len(printed) > 2
    lines: list[str] = []
    model, other = (train_model(SMALL[name](), seed, log=lines.append) for seed in (5, 6))
    assert not model.training and not same(model, other)
    loaded: nn.Module
    if name.endswith("dictionary"):
        loaded = SparseAutoencoder.load(out)
    else:
        loaded, _ = load_bundled(name, out)
        assert {path.name for path in out.iterdir()} <= {
            *("config.json", "model.safetensors", "vocab.json")
        }
    assert same(loaded, model)


def test_names_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"name='passkeys': no such bundled model.*passkey-mamba"):
        train("passkeys", tmp_path / "out")


# --- language models -------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["mamba", "mamba2"])
def test_a_model_learns_to_copy(architecture: str) -> None:
    size = ModelSize(architecture, layers=1, hidden=32, state=8)
    task = CopyingTask(symbols=4, shortest=1, longest=2)
    recipe = LanguageRecipe(task, size, steps=(80,), batch_size=32, learning_rate=1e-2)
    model = train_model(recipe, log=silent)
    fresh = task.batch(task.draw(200, random.randrange(10**6)))
    assert answer_accuracy(model, fresh).tokens >= 0.9


# --- image classifiers -----------------------------------------------------------------------


# --- classifiers of texts --------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["mamba", "rwkv", "bert"])
def test_words_then_the_model_are_learned(architecture: str, seed: int) -> None:
    made = texts(
        architecture, steps=(60, 80), learning_rate=1e-2, words_rate=2e-2, hidden_words=0.1
    )
    model = train_model(made, seed, log=silent)
    reader = made.reader(made.task.vocabulary)
    known = [*made.task.texts("test"), *made.task.texts("train")]
    assert class_accuracy(lambda ids: bag_logits(model, reader, ids), reader, known) >= 0.8
    assert class_accuracy(lambda ids: reader.logits(model, ids), reader, known) >= 0.8
    told = class_weights(model)[list(reader.classes)]
    torch.testing.assert_close(told[0], -told[1], rtol=0, atol=1e-6)
    assert set(made.measure(model)) == {"movies", "tweets", "products", "editorials", "all"}


def test_the_loss_is_that_of_the_rated_chances() -> None:
    some = RatedTexts(least=2).texts("train")[:5]
    logits = torch.randn(5, 2, dtype=torch.float64)
    expected = 0.0
    for row, text in zip(logits.tolist(), some, strict=True):
        chance = 1 / (1 + math.exp(-text.valence))
        said = 1 / (1 + math.exp(row[0] - row[1]))
        expected -= chance * math.log(said) + (1 - chance) * math.log(1 - said)
    assert rating_loss(logits, some).item() == pytest.approx(expected / 5)


# --- dictionaries ----------------------------------------------------------------------------


def test_a_dictionary_learns_what_the_layer_puts_out() -> None:
    recipe = replace(dictionary(), size=DictionarySize(64, 4), steps=(200,), texts=64)
    model = train_model(recipe, log=silent)
    assert isinstance(model, SparseAutoencoder)
    torch.testing.assert_close(model.W_dec.norm(dim=-1), torch.ones(64), rtol=0.1, atol=0)
    explained, _ = load_bundled("recall-mamba")
    x = recipe.outputs(explained, 16, 99)
    assert dictionary_recipes.explained_share(model, x) > 0.5
    assert int((model.encode(x) > 0).sum(-1).max()) <= 4


def test_recipes_of_all_that_ships() -> None:
    from captum_ssm_bench.bundled import BUNDLED

    assert set(loop.RECIPES) == set(BUNDLED)
    assert all(recipe_of(name).steps for name in (*BUNDLED, "recall-mamba-dictionary"))
