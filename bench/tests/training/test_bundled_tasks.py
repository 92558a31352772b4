"""The shipped models do what their cards say, measured anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import captum_ssm_bench as bench
from captum_ssm import models
from captum_ssm.errors import OptionError
from captum_ssm_bench import load_bundled

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm.models.small import MODELS
from captum_ssm.tracing import repaired_scans
from captum_ssm_bench.bundled import weights_of
from captum_ssm_bench.tasks import LinkedTask, answer_accuracy, swap_check
from captum_ssm_bench.training.language_recipes import (
    ANSWER_RECIPES,
    FURTHER_RECIPES,
    LANGUAGE_RECIPES,
    ROLE_RECIPES,
    accuracy_by_length,
)

RECIPES = LANGUAGE_RECIPES | FURTHER_RECIPES | ROLE_RECIPES | ANSWER_RECIPES
#: Their recurrences know no mask, and read padding as if it were words.
READ_PADDING = ("rwkv", "griffin")
STATES = ("mamba", "mamba2", "bamba")


class Card(NamedTuple):
    """Bounds of what a card tells, wide enough for a few hundred fresh texts.

    Attributes:
        tokens: least share of answered tokens.
        sequences: least share of texts.
        moved: least share of exchanged sources that are followed.
        strayed: greatest share of other tokens that change.
        hardest: least share of texts at each length.
        exchanged: texts whose sources are exchanged, fewer where each has many.
    """

    tokens: float = 0.99
    sequences: float = 0.98
    moved: float = 0.95
    strayed: float = 0.03
    hardest: float = 0.95
    exchanged: int = 96


CARDS = {
    "recall-mamba": Card(hardest=0.97),
    "copying-mamba": Card(sequences=0.88, strayed=0.2, hardest=0.65, exchanged=24),
    "copying-mamba2": Card(tokens=0.995, sequences=0.94, hardest=0.82, exchanged=24),
    "translation-mamba": Card(),
    "translation-mamba2": Card(),
    "passkey-mamba": Card(strayed=0.06),
    "passkey-mamba2": Card(),
    "two-passkeys-mamba": Card(strayed=0.2),
    "two-passkeys-mamba2": Card(),
    "frequent-word-mamba": Card(),
    "frequent-word-mamba2": Card(),
    "pairs-mamba": Card(tokens=0.96, sequences=0.96),
    "pairs-mamba2": Card(tokens=0.96, sequences=0.96),
    "pairs-gated-deltanet": Card(),
    "pairs-rwkv": Card(tokens=0.96, sequences=0.96, hardest=0.94),
    "pairs-griffin": Card(tokens=0.9, sequences=0.9, moved=0.92, hardest=0.9),
    "pairs-bamba": Card(),
    "copying-bamba": Card(sequences=0.96, strayed=0.15, hardest=0.93, exchanged=24),
    "translation-gated-deltanet": Card(),
    "translation-rwkv": Card(),
    "passkey-gated-deltanet": Card(strayed=0.3),
    "two-passkeys-gated-deltanet": Card(strayed=0.25),
    "chains-mamba": Card(),
    "chains-mamba2": Card(),
}


@pytest.fixture(scope="module", params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> torch.nn.Module:
    return load_bundled(name)[0]


@pytest.fixture
def length(name: str) -> int | None:
    """Of the texts of a batch: any, or one where padding would be read."""
    recipe = RECIPES[name]
    return recipe.task.longest if recipe.size.architecture in READ_PADDING else None


@pytest.fixture
def task(name: str) -> LinkedTask:
    return RECIPES[name].task


def test_accuracy_on_fresh_texts(
    name: str, model: torch.nn.Module, task: LinkedTask, length: int | None, seed: int
) -> None:
    accuracy = answer_accuracy(model, task.batch(task.draw(256, seed, length)))
    assert accuracy.tokens >= CARDS[name].tokens
    assert accuracy.sequences >= CARDS[name].sequences


def test_accuracy_at_every_length(
    name: str, model: torch.nn.Module, task: LinkedTask, seed: int
) -> None:
    scores = accuracy_by_length(model, task, per_length=256, seed=seed)
    assert min(score.sequences for score in scores.values()) >= CARDS[name].hardest
    assert max(scores) > 0.95 * task.longest and min(scores) == task.shortest


def test_the_gold_source_is_the_cause(
    name: str, model: torch.nn.Module, task: LinkedTask, length: int | None, seed: int
) -> None:
    card = CARDS[name]
    check = swap_check(model, task.batch(task.draw(card.exchanged, seed, length)), seed)
    assert check.moved >= card.moved
    assert not check.strayed > card.strayed, "where there are other tokens"


@pytest.mark.parametrize(
    "name",
    [name for name, recipe in RECIPES.items() if recipe.size.architecture not in READ_PADDING],
    scope="module",
)
def test_left_padding_changes_nothing(model: torch.nn.Module, task: LinkedTask, seed: int) -> None:
    examples = [task.draw(1, seed + n, n)[0] for n in (task.shortest, task.longest)]
    batch = task.batch(examples)
    with torch.no_grad(), repaired_scans():
        padded = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        for row, example in enumerate(examples):
            alone = model(input_ids=task.batch([example]).input_ids).logits[0]
            torch.testing.assert_close(padded[row, -len(alone) :], alone, rtol=1e-4, atol=1e-4)


def test_shipped_files(name: str, task: LinkedTask) -> None:
    folder = weights_of(name).parent
    of_all, of_experiments = Path(models.__file__).parent, Path(bench.__file__).parent / "weights"
    assert folder == (of_all if name == "recall-mamba" else of_experiments) / name
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "vocab.json",
    }
    assert weights_of(name).stat().st_size <= 400_000
    assert json.loads((folder / "vocab.json").read_text("utf-8")) == task.vocabulary.vocab
    assert load_bundled(name)[1].vocab == task.vocabulary.vocab


def test_the_card_says_how_the_model_is_made(name: str, model: torch.nn.Module) -> None:
    card = " ".join((weights_of(name).parent / "README.md").read_text("utf-8").split())
    count = f"{sum(p.numel() for p in model.parameters()):,}".replace(",", " ").strip()
    assert card.startswith(f"# {name} ")
    assert f"{count} parameters" in card
    assert f'load_bundled("{name}")' in card
    size = RECIPES[name].size
    layers = f"{size.layers} layers" if size.layers > 1 else "1 layer"
    assert f"{layers}, hidden size {size.hidden}" in card
    assert f"state size {size.state}" in card or size.architecture not in STATES
    assert all(
        f"{steps} steps" in card or f"--steps {steps}" in card for steps in RECIPES[name].steps
    )


def test_it_is_the_plain_class_of_transformers(name: str, model: torch.nn.Module) -> None:
    import transformers

    loaded: Any = model
    assert type(loaded) is getattr(transformers, MODELS[RECIPES[name].size.architecture])
    assert not loaded.training
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


def test_it_has_the_size_of_its_recipe(name: str, model: torch.nn.Module) -> None:
    loaded: Any = model
    size, config = RECIPES[name].size, loaded.config
    assert (config.num_hidden_layers, config.hidden_size) == (size.layers, size.hidden)
    state = getattr(config, "state_size", getattr(config, "mamba_d_state", None))
    assert state == size.state or size.architecture not in STATES


def test_loading_leaves_the_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    load_bundled(name)
    assert torch.equal(torch.get_rng_state(), before)


def test_names_are_known() -> None:
    assert set(CARDS) == set(RECIPES)
    assert all(name.endswith(f"-{recipe.size.architecture}") for name, recipe in RECIPES.items())
    with pytest.raises(OptionError, match=r"name='copying': no such bundled model.*copying-mamba"):
        weights_of("copying")
