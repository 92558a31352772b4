"""The shipped recall model does what its card says, measured anew."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from captum_ssm.errors import CheckpointError
from captum_ssm.models import bundled, load_bundled
from captum_ssm.models.recall import OBJECTS, Example, accuracy, generate, parse_prompt

FOLDER = Path(bundled.__file__).parent / "recall-mamba"
SEED = 20_240_607


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_bundled()[0]


def _with_another(rng: random.Random, example: Example) -> Example:
    words = list(example.words)
    words[example.value_position] = rng.choice([o for o in OBJECTS if o != example.answer])
    return parse_prompt(" ".join(words))


@pytest.mark.slow
@pytest.mark.parametrize("facts", [2, 5, 8])
def test_accuracy_at_every_number_of_facts(model: torch.nn.Module, facts: int) -> None:
    assert accuracy(model, generate(128, SEED + 10, facts)) >= 0.97


@pytest.mark.slow
def test_replacing_the_gold_value_moves_the_answer_to_it(model: torch.nn.Module) -> None:
    rng = random.Random(SEED + 1)
    changed = [_with_another(rng, example) for example in generate(512, SEED + 2)]
    assert accuracy(model, changed) >= 0.98


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="recall-mamba"):
        load_bundled("other")


def test_models_are_in_evaluation_mode() -> None:
    assert not any(module.training for module in load_bundled()[0].modules())


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "captum-ssm\[hf\]"'):
        load_bundled()


def test_a_missing_weight_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "vocab.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    weights = load_file(FOLDER / "model.safetensors")
    del weights["backbone.layers.0.mixer.D"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 'backbone\.layers\.0\.mixer\.D'"):
        load_bundled("recall-mamba", tmp_path)
