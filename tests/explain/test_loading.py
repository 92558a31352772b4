"""Broken or hostile folders, files and images end in a sentence."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.hostile_weights import BROKEN
from helpers.little_memory import at_most
from safetensors.torch import load_file, save_file

from captum_ssm.cli import main
from captum_ssm.errors import CheckpointError, InputError
from captum_ssm.explain.image_inputs import read_small_image, read_vim
from captum_ssm.explain.loading import Source, load
from captum_ssm.models import VisionMamba, bundled

SHIPPED = Path(bundled.__file__).parent / "recall-mamba"


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Sizes are to be checked before memory is taken for them."""
    with at_most():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "mine"))


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 10**9}, "mine: configuration and weights do not fit"),
    ({"state_size": -1}, "do not fit.*(negative|lower bound)"),
    ({"hidden_size": "wide"}, "mine has no usable configuration"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; at most 4096"),
    ({"model_type": "../x"}, "mine has no usable configuration"),
]


def test_hostile_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = folder / "config.json", folder.parent / "out.json"
    plain = json.loads(path.read_text())
    for settings, message in HOSTILE:
        path.write_text(json.dumps(plain | settings))
        with pytest.raises(CheckpointError, match=message):
            load(Source(str(folder)))
    assert main(["explain", str(folder), "--text", "anna owns the", "--out", str(out)]) == 1
    assert "captum-ssm: " in capsys.readouterr().err
    assert not out.exists()


def test_broken_weights(folder: Path) -> None:
    for content in BROKEN.values():
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="mine: configuration and weights"):
            load(Source(str(folder)))


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    shutil.copy(SHIPPED / "vocab.json", folder)
    return folder


def language_model(**options: Any) -> Any:
    config = transformers.MambaConfig(
        vocab_size=19, hidden_size=8, state_size=3, num_hidden_layers=2, **options
    )
    return transformers.MambaForCausalLM(config)


def neox() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.GPTNeoXConfig(vocab_size=19, num_hidden_layers=1, **sizes)
    return transformers.GPTNeoXForCausalLM(config)


def test_weights_that_are_missing_are_named_and_not_filled_at_random(tmp_path: Path) -> None:
    folder = saved(language_model(tie_word_embeddings=False), tmp_path / "mine")
    source = Source(str(folder))
    assert load(source).is_language

    def lose(weights: dict[str, Any]) -> None:
        del weights["lm_head.weight"], weights["backbone.layers.1.mixer.A_log"]

    changed(folder, lambda weights: weights.update({"lm_head.weight": torch.zeros(19, 5)}))
    message = r"shapes differ in 'lm_head\.weight' \(\(19, 5\) instead of \(19, 8\)\)"
    with pytest.raises(CheckpointError, match=message):
        load(source)
    changed(folder, lose)
    message = (
        r"mine: its weights do not fill its MambaForCausalLM, and the rest would be random: they "
        r"lack 'backbone\.layers\.1\.mixer\.A_log', 'lm_head\.weight'\. Save the whole model with"
    )
    with pytest.raises(CheckpointError, match=message):
        load(source)
    # the head of the one is its embedding; the rotations of the other follow from its sizes
    for number, model in enumerate((language_model(), neox())):
        folder = saved(model, tmp_path / str(number))
        stored = load_file(folder / "model.safetensors")
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        assert own.keys() - stored.keys()
        found = load(Source(str(folder))).model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_of_pickled_weights_runs(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    made = folder / "made"
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Touch(made), file, protocol=2)
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        load(Source(str(folder)))
    assert not made.exists()
    with (folder / "pytorch_model.bin").open("rb") as file:  # the trap is a real one
        pickle.load(file)
    assert made.exists()


def test_narrow_images(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "narrow.png"
    model = VisionMamba(img_size=32, patch_size=16, depth=1, embed_dim=8, num_classes=2)
    for size in ((1, 4000), (4000, 1), (101, 1)):
        pillow.new("RGB", size).save(path)
        for prepare in (lambda: read_vim(model, path), lambda: read_small_image(path, 32)):
            with pytest.raises(InputError, match=rf"w\.png has {size[0]} x {size[1]} pixels"):
                prepare()
    pillow.new("RGB", (100, 1), (255, 0, 0)).save(path)
    assert read_vim(model, path).shape == (3, 32, 32)
    assert read_small_image(path, 32)[:, 5, 5].tolist() == pytest.approx([1, -1, -1], abs=1e-5)
