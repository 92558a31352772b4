"""Models to explain: those that ship with the package, and others of the same recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm.errors import DataNotFoundError, OptionError
from captum_ssm_bench import EXPERIMENTS, load_bundled
from captum_ssm_bench.harness.experiment import name_of
from captum_ssm_bench.harness.subjects import asked, bundled, retrained
from captum_ssm_bench.training.recipes import recipe_of

NAME = "passkey-mamba"
PASSKEYS = EXPERIMENTS["passkey"]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that was trained for no step at all."""
    recipe = recipe_of(NAME)
    recipe.save(recipe.new(), tmp_path / "again")
    return tmp_path / "again"


def test_a_bundled_model() -> None:
    subject = bundled(NAME)
    assert subject.label == subject.name == NAME
    for one, other in zip(
        subject.load(CPU).parameters(), load_bundled(NAME)[0].parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_model_trained_again(folder: Path) -> None:
    subject = retrained(NAME, folder)
    assert subject.name == NAME == name_of(subject.label) and subject.label != NAME
    assert subject.fingerprint != bundled(NAME).fingerprint
    for one, other in zip(
        subject.load(CPU).parameters(), load_bundled(NAME, folder)[0].parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_examples_are_the_same_for_all_trainings(folder: Path) -> None:
    subjects = asked(PASSKEYS, [NAME, f"{NAME}={folder}"])
    assert [subject.name for subject in subjects] == [NAME, NAME]
    first, second = (PASSKEYS.example(subject, 2, 1) for subject in subjects)
    assert torch.equal(first.ids, second.ids)


def test_models_of_other_experiments_are_left_out() -> None:
    assert asked(PASSKEYS, ["copying-mamba"]) == []
    assert {each.name for each in asked(PASSKEYS, None)} == {NAME, "passkey-mamba2"}


def test_the_same_weights_twice(folder: Path) -> None:
    with pytest.raises(OptionError, match="same weights of 'passkey-mamba' are named twice"):
        asked(PASSKEYS, [f"{NAME}={folder}", f"{NAME}={folder}/"])


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="captum-ssm-bench train passkey-mamba --seed 1"):
        asked(PASSKEYS, [f"{NAME}={tmp_path}"])
