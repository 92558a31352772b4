"""The shipped dictionary does what its card says, measured anew, and its recipe makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from captum_ssm.errors import OptionError
from captum_ssm_bench.cli import main

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm.inside.dictionary import SparseAutoencoder
from captum_ssm.models import bundled, load_bundled, load_dictionary
from captum_ssm.models.recall import Example, generate
from captum_ssm.models.recall_batch import accuracy, collate
from captum_ssm.tracing import repaired_scans
from captum_ssm_bench.training import dictionary_recipes, recipes
from captum_ssm_bench.training.dictionary_recipes import DICTIONARY_RECIPES, DictionarySize
from captum_ssm_bench.training.loop import train, train_model

NAME = "recall-mamba-dictionary"
RECIPE = DICTIONARY_RECIPES[NAME]
FOLDER = Path(bundled.__file__).parent / NAME
TINY = replace(RECIPE, size=DictionarySize(features=16, k=2), steps=(20,), texts=8, batch_size=32)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load_bundled("recall-mamba")[0]


@pytest.fixture(scope="module")
def dictionary() -> SparseAutoencoder:
    return load_dictionary("recall-mamba")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is measured, in training and after it."""
    monkeypatch.setattr(dictionary_recipes, "_HELD_OUT", 8)
    monkeypatch.setattr(dictionary_recipes, "_MEASURED", 8)


@contextmanager
def changed(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The first block puts out something else."""
    block = model.get_submodule("backbone.layers.0")
    hook = block.register_forward_hook(lambda module, args, output: change(output))
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def outputs(model: nn.Module, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """What the first block puts out (B, L, E), and where there are words (B, L)."""
    batch, found = collate(examples), []
    with changed(model, lambda x: found.append(x) or x), repaired_scans():
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    return found[0], batch.attention_mask.bool()


@torch.no_grad()
def test_it_tells_what_the_block_puts_out(
    model: nn.Module, dictionary: SparseAutoencoder, seed: int
) -> None:
    x, real = outputs(model, generate(512, seed))
    x = x[real]
    left = (x - dictionary(x)).var(0, correction=0).sum() / x.var(0, correction=0).sum()
    active = dictionary.encode(x) > 0
    assert 1 - left >= 0.96
    assert int(active.sum(-1).max()) <= RECIPE.size.k
    # one that is rare may not occur among these
    assert int((~active.any(0)).sum()) <= 0.25 * RECIPE.size.features


def test_the_model_answers_from_what_it_tells(
    model: nn.Module, dictionary: SparseAutoencoder, seed: int
) -> None:
    examples = generate(512, seed)
    mean = outputs(model, examples)[0].mean((0, 1))
    with repaired_scans(), torch.no_grad():
        with changed(model, dictionary):
            by_features = accuracy(model, examples)
        with changed(model, lambda x: mean.expand_as(x)):
            by_nothing = accuracy(model, examples)
    assert by_features >= 0.98
    assert by_nothing <= 0.2, "the answer does not need this block"


@torch.no_grad()
def test_names_have_features_where_they_are_carried(
    model: nn.Module, dictionary: SparseAutoencoder, seed: int
) -> None:
    """Of every name there is a feature for "owned by it", at the article before the object."""
    examples = generate(512, seed)
    x, real = outputs(model, examples)
    active, names = [], []
    for row, example in enumerate(examples):
        for fact in example.facts:
            if fact.value_position == fact.name_position + 3:  # no adjective between
                place = int((~real[row]).sum()) + fact.value_position - 1
                active.append(dictionary.encode(x[row, place]) > 0)
                names.append(fact.name)
    on = torch.stack(active).double()
    for name in sorted(set(names)):
        own = torch.tensor([each == name for each in names])
        apart = on[own].mean(0) - on[~own].mean(0)
        assert float(apart.max()) >= 0.5, name


def test_shipped_files(dictionary: SparseAutoencoder) -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        "README.md",
        "cfg.json",
        "sae_weights.safetensors",
    }
    assert (FOLDER / "sae_weights.safetensors").stat().st_size <= 400_000
    assert (dictionary.features, dictionary.k) == (RECIPE.size.features, RECIPE.size.k)
    assert (dictionary.layer, dictionary.metadata["model_name"]) == (RECIPE.layer, "recall-mamba")
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in dictionary.parameters())


def test_the_card_says_how_it_is_made() -> None:
    card = " ".join((FOLDER / "README.md").read_text("utf-8").split())
    size = RECIPE.size
    assert card.startswith(f"# {NAME} ")
    assert f"{size.features} features" in card and f"{size.k} of them" in card
    assert f"`{RECIPE.layer}`" in card and f"train {NAME}" in card
    assert all(f"{steps} steps" in card for steps in RECIPE.steps)
    assert f"learning rate {RECIPE.learning_rate:g}" in card
    assert f"batches of {RECIPE.batch_size} tokens" in card and f"{RECIPE.texts} prompts" in card


def test_every_recipe_ships() -> None:
    assert {f"{name}-dictionary" for name in bundled._DICTIONARIES} == set(DICTIONARY_RECIPES)


def test_a_name_without_a_dictionary() -> None:
    with pytest.raises(OptionError, match=r"name='copying-mamba': no dictionary.*recall-mamba"):
        load_dictionary("copying-mamba")


def test_the_same_seed_gives_the_same_dictionary(few: None, seed: int) -> None:
    lines: list[str] = []
    first, again, other = (
        train_model(TINY, each, log_every=20, log=lines.append) for each in (seed, seed, seed + 1)
    )
    assert torch.equal(first.W_enc, again.W_enc) and not torch.equal(first.W_enc, other.W_enc)
    assert "step 20/20" in lines[0] and "held-out" in lines[0]


def test_training_reaches_every_part(few: None, seed: int) -> None:
    torch.manual_seed(seed)
    before = TINY.new().state_dict()
    after = train_model(TINY, seed, log=lambda line: None).state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    norms = after["W_dec"].norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-3)


def test_the_command_makes_a_dictionary(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(recipes.DICTIONARY_RECIPES, NAME, TINY)
    command = ["train", NAME, "--out", str(tmp_path), "--steps", "3"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "step 3/3" in said and "explained" in said and "of the dictionary" in said
    assert load_dictionary("recall-mamba", tmp_path).features == 16


def test_a_dictionary_has_no_layers_to_change(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"layers=3: the size of .* has no such number.*features"):
        train(NAME, tmp_path, layers=3)


@pytest.mark.parametrize("size", [{"k": 0}, {"features": 4, "k": 5}])
def test_sizes_that_do_not_fit(size: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=f"k={size['k']}: of"):
        DictionarySize(**size)


def test_a_short_training_finds_features(model: nn.Module, seed: int) -> None:
    made = train_model(replace(RECIPE, steps=(300,), texts=1024), seed, log=lambda line: None)
    examples = generate(256, seed)
    with repaired_scans(), torch.no_grad(), changed(model, made):
        assert accuracy(model, examples) >= 0.9
