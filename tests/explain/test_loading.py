"""A folder, a file or an image that is broken or hostile ends in a sentence that names it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from hostile_weights import BROKEN
from little_memory import at_most

from captum_ssm.cli import main
from captum_ssm.errors import CheckpointError, InputError
from captum_ssm.explain.loading import Source, load
from captum_ssm.explain.pictures import for_vim, scene
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 10**9}, "mine: its configuration and its weights make no model"),
        ({"vocab_size": 10**13}, "mine: its configuration and its weights make no model"),
        ({"state_size": -1}, "make no model.*negative"),
        ({"hidden_size": "wide"}, "mine has no usable configuration"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; at most 4096"),
        ({"num_labels": 10**10}, "num_labels = 10000000000; at most 1000000"),
        ({"model_type": "../x"}, "mine has no usable configuration"),
    ],
)
def test_hostile_settings(
    settings: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=message):
        load(Source(str(folder)))
    out = folder.parent / "out.json"
    assert main(["explain", str(folder), "--text", "anna owns the", "--out", str(out)]) == 1
    assert "captum-ssm: " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("what", BROKEN)
def test_broken_weights(what: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(BROKEN[what])
    with pytest.raises(CheckpointError, match="mine: its configuration and its weights"):
        load(Source(str(folder)))


class Touch:
    """Makes a file when it is unpickled."""

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


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (101, 1)])
def test_images_too_narrow_to_see(size: tuple[int, int], tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "narrow.png"
    pillow.new("RGB", size).save(path)
    model = VisionMamba(img_size=32, patch_size=16, depth=1, embed_dim=8, num_classes=2)
    for prepare in (lambda: for_vim(model, path), lambda: scene(path, 32)):
        with pytest.raises(InputError, match=rf"narrow\.png is of {size[0]} x {size[1]} pixels"):
            prepare()


def test_narrow_images_that_can_be_seen(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "narrow.png"
    pillow.new("RGB", (100, 1), (255, 0, 0)).save(path)
    model = VisionMamba(img_size=32, patch_size=16, depth=1, embed_dim=8, num_classes=2)
    assert for_vim(model, path).shape == (3, 32, 32)
    assert scene(path, 32)[:, 5, 5].tolist() == pytest.approx([1, -1, -1], abs=1e-5)
