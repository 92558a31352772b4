"""Training: the same seed gives the same model, tasks are learned, and the command makes models."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_ssm.errors import OptionError
from captum_ssm_bench.cli import main

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm.models.recall import recall_vocabulary
from captum_ssm.models.small import ModelSize
from captum_ssm_bench import load_bundled
from captum_ssm_bench.tasks import (
    CopyingTask,
    FrequentWordTask,
    LinkedTask,
    PasskeyTask,
    RecallTask,
    TranslationTask,
    answer_accuracy,
)
from captum_ssm_bench.training import language_recipes, recipes
from captum_ssm_bench.training.language_recipes import (
    LANGUAGE_RECIPES,
    LanguageRecipe,
    accuracy_by_length,
)
from captum_ssm_bench.training.loop import train, train_model

COPIES = CopyingTask(symbols=3, shortest=1, longest=3)
TASKS: list[LinkedTask] = [
    COPIES,
    RecallTask(),
    TranslationTask(longest=2),
    PasskeyTask(shortest=18, longest=22),
    FrequentWordTask(shortest=19, longest=22),
]


def _tiny(architecture: str) -> ModelSize:
    return ModelSize(architecture, layers=1, hidden=16, state=4, head_dim=8)


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("architecture", ["mamba", "mamba2"])
@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_model(architecture: str, task: LinkedTask, seed: int) -> None:
    lines: list[str] = []

    def trained(seed: int) -> torch.nn.Module:
        recipe = LanguageRecipe(task, _tiny(architecture), steps=(3, 2), batch_size=4)
        return train_model(recipe, seed, log_every=3, log=lines.append)

    one, again, other = trained(seed), trained(seed), trained(seed + 1)
    assert [line.split()[1] for line in lines] == ["3/3", "2/2"] * 3
    assert not one.training
    assert _same(one, again)
    for a, c in zip(one.parameters(), other.parameters(), strict=True):
        assert a.unique().numel() == 1 or not torch.equal(a, c)


@pytest.mark.parametrize("architecture", ["mamba", "mamba2"])
def test_a_model_learns_to_copy(architecture: str) -> None:
    size = ModelSize(architecture, layers=1, hidden=32, state=8)
    task = CopyingTask(symbols=4, shortest=1, longest=2)
    recipe = LanguageRecipe(task, size, steps=(80,), batch_size=32, learning_rate=1e-2)
    model = train_model(recipe, log=lambda line: None)
    fresh = task.batch(task.draw(200, random.randrange(10**6)))
    assert answer_accuracy(model, fresh).tokens >= 0.9


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_batches_have_the_greatest_of_the_drawn_lengths(
    draws: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    lengths: list[int | None] = []
    draw = CopyingTask.draw

    def watched(task: CopyingTask, count: int, seed: Any, length: int | None = None) -> list[str]:
        lengths.append(length)
        return draw(task, count, seed, length)

    monkeypatch.setattr(CopyingTask, "draw", watched)
    recipe = LanguageRecipe(COPIES, _tiny("mamba"), steps=(60,), draws=draws, batch_size=1)
    train_model(recipe, seed, log=lambda line: None)
    held_out, *drawn = lengths
    assert held_out is None and len(drawn) == 60
    share = drawn.count(COPIES.longest) / 60
    expected = 1 - (2 / 3) ** draws
    assert abs(share - expected) <= 5 * (expected * (1 - expected) / 60) ** 0.5


@pytest.mark.parametrize(
    ("task", "lengths"),
    [
        (COPIES, [1, 2, 3]),
        (CopyingTask(shortest=1, longest=20), list(range(1, 20, 2))),
        (PasskeyTask(), list(range(64, 129, 5))),
    ],
)
def test_lengths_that_are_measured(
    task: LinkedTask, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measured(model: torch.nn.Module, batch: Any) -> int:
        seen.append(tuple(batch.input_ids.shape))
        return len(seen)

    monkeypatch.setattr(language_recipes, "answer_accuracy", measured)
    scores = accuracy_by_length(torch.nn.Identity(), task, per_length=2)
    assert list(scores) == lengths
    assert list(scores.values()) == list(range(1, len(lengths) + 1))
    assert {rows for rows, _ in seen} == {2}
    widths = [width for _, width in seen]
    assert widths == sorted(set(widths)), "each is of its own length"


def test_a_saved_model_loads_again(tmp_path: Path, seed: int) -> None:
    recipe = LanguageRecipe(RecallTask(), _tiny("mamba"), steps=(1,), batch_size=2)
    model = train_model(recipe, seed, log=lambda line: None)
    recipe.save(model, tmp_path)
    again, vocabulary = load_bundled("recall-mamba", tmp_path)
    assert vocabulary.vocab == recall_vocabulary().vocab
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


@pytest.mark.parametrize("name", ["copying-mamba", "copying-mamba2"])
def test_command_line(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = replace(LANGUAGE_RECIPES[name], task=COPIES, steps=(2, 1))
    monkeypatch.setitem(recipes.RECIPES, name, recipe)
    threads = torch.get_num_threads()
    assert main(f"train {name} --out {tmp_path} --seed 5 --layers 1 --state 4".split()) == 0
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[:2]] == ["2/2", "1/1"]
    assert [line.partition(":")[0] for line in printed[2:]] == ["length 1", "length 2", "length 3"]
    model, vocabulary = load_bundled(name, tmp_path)
    assert vocabulary.vocab == COPIES.vocabulary.vocab
    loaded: Any = model
    assert (loaded.config.num_hidden_layers, loaded.config.state_size) == (1, 4)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "vocab.json",
    }
    changed = replace(recipe, size=replace(recipe.size, layers=1, state=4))
    assert _same(model, train_model(changed, 5, log=lambda line: None))


def test_train_makes_what_the_command_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    recipe = replace(LANGUAGE_RECIPES["passkey-mamba2"], task=TASKS[3], steps=(2,))
    monkeypatch.setitem(recipes.RECIPES, "passkey-mamba2", recipe)
    lines: list[str] = []
    model = train("passkey-mamba2", tmp_path / "one", seed, lines.append)
    assert [line.split()[0] for line in lines] == ["step"] + 5 * ["length"]
    other = ["train", "passkey-mamba2", "--out", str(tmp_path / "other"), "--seed", str(seed)]
    assert main(other) == 0
    for folder in ("one", "other"):
        assert _same(model, load_bundled("passkey-mamba2", tmp_path / folder)[0])


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"name='passkeys': no such bundled model.*passkey-mamba"):
        train("passkeys", tmp_path / "out")
    assert not (tmp_path / "out").exists()
