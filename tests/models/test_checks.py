"""Broken and hostile files of models are refused, in words, before memory is taken for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hostile_weights import BROKEN
from helpers.little_memory import at_most
from safetensors.torch import save_file

from captum_ssm.errors import CheckpointError, DataNotFoundError, InputError, OptionError
from captum_ssm.models import VisionMamba, bundled, folders, load_bundled, load_vim

SHIPPED = Path(bundled.__file__).parent


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Sizes are to be checked before memory is taken for them."""
    with at_most():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled recall model's folder."""
    return Path(shutil.copytree(SHIPPED / "recall-mamba", tmp_path / "recall"))


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("what", BROKEN)
def test_broken_safetensors(what: str, tmp_path: Path, folder: Path) -> None:
    alone = tmp_path / "vim.safetensors"
    for path in (alone, folder / "model.safetensors"):
        path.write_bytes(BROKEN[what])
    with pytest.raises(
        CheckpointError, match=r"vim\.safetensors is not a complete safetensors file.*again"
    ):
        load_vim(alone)
    with pytest.raises(
        CheckpointError, match=r"recall/model\.safetensors is not a complete safetensors file"
    ):
        load_bundled("recall-mamba", folder)


def test_broken_torch_files(tmp_path: Path) -> None:
    path = tmp_path / "vim.pth"
    for content in (b"", b"hello", b"PK\3\4" + bytes(40), bytes(100)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"vim\.pth (is not a complete|cannot be read)"):
            load_vim(path)
    torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, path)
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match=r"'a' has shape \(1000000, 1000000\), but the file"):
        load_vim(path)


@pytest.mark.parametrize(("settings", "message"), [
    ({"hidden_size": 10**9}, r"does not fit config\.json: shapes differ in .*1000000000"),
    ({"vocab_size": 10**13}, r"does not fit config\.json: shapes differ"),
    ({"state_size": -1}, r"no model can be built from .*config\.json"),
    ({"hidden_size": "wide"}, r"no model can be built from .*config\.json"),
    ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1000000000; at most 4096"),
    ({"num_hidden_layers": 3}, r"does not fit config\.json: it lacks 'backbone\.layers\.2"),
    ({"num_labels": 10**9}, r"num_labels = 1000000000"),
    ({"architectures": ["../x"]}, r"architectures = \['\.\./x'\]\. Use a list"),
    ({"architectures": ["pipeline"]}, "Use a list with the name of one transformers model"),
    ({"architectures": 5}, "Use a list with the name of one transformers model"),
])  # fmt: skip
def test_hostile_settings(settings: dict[str, Any], message: str, folder: Path) -> None:
    change(folder, **settings)
    with pytest.raises(CheckpointError, match=message):
        load_bundled("recall-mamba", folder)


def test_files_that_are_no_json_or_missing(folder: Path) -> None:
    for text in ("{", "", "[" * 10**5):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
            load_bundled("recall-mamba", folder)
        shutil.copy(SHIPPED / "recall-mamba" / "config.json", folder)
        (folder / "vocab.json").write_text(text)
        with pytest.raises(InputError, match=r"vocab\.json is not JSON.*Pass a file"):
            load_bundled("recall-mamba", folder)
    (folder / "model.safetensors").unlink()
    missing = r"model\.safetensors does not exist\. Pass a folder that"
    with pytest.raises(DataNotFoundError, match=missing):
        load_bundled("recall-mamba", folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json contains a list; pass a JSON object"):
        load_bundled("recall-mamba", folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataNotFoundError, match=r"config\.json does not exist"):
        load_bundled("recall-mamba", folder)


@pytest.mark.parametrize(("settings", "message"), [
    ({"embed_dim": 10**5}, "does not fit config"),
    ({"embed_dim": 10**9}, "no model can be built"),
    ({"depth": 10**9}, "depth = 1000000000; at most 4096"),
    ({"patch_size": 10**4}, "patch_size=10000 does not fit img_size"),
    ({"colour": 1}, "no model can be built.*colour"),
])  # fmt: skip
def test_hostile_vision_mamba(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    own = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 6, "num_classes": 2}
    save_file(VisionMamba(**own).state_dict(), tmp_path / folders.WEIGHTS)
    named = {"architectures": ["VisionMamba"], "id2label": {0: "a", 1: "b"}}
    (tmp_path / folders.CONFIG).write_text(json.dumps(own | named))
    assert folders.load_folder(tmp_path)[1] == ("a", "b")
    change(tmp_path, **settings)
    with pytest.raises((CheckpointError, OptionError), match=message):
        folders.load_folder(tmp_path)


def test_names_lead_to_no_other_folder() -> None:
    for name in ("../recall-mamba", "recall-mamba/../recall-mamba", "/", ""):
        for find in (load_bundled, bundled.weights_of):
            with pytest.raises(OptionError, match="no such bundled model"):
                find(name)


def test_sizes_of_vision_mamba() -> None:
    for options, message in (
        ({"img_size": 32, "patch_size": 64}, "patch_size=64 does not fit img_size=32.*1 to 32"),
        ({"img_size": (64, 8), "patch_size": 16}, "patch_size=16 does not fit img_size.*1 to 8"),
        ({"img_size": 0}, "patch_size=16 does not fit img_size=0"),
        ({"stride": 0}, "stride=0: use 1 or more"),
        ({"depth": 0}, "depth=0: use 1 or more"),
    ):
        with pytest.raises(OptionError, match=message):
            VisionMamba(**({"depth": 1, "embed_dim": 8} | options))  # type: ignore[arg-type]
    model = VisionMamba(img_size=(8, 9), patch_size=8, depth=1, embed_dim=8, num_classes=3)
    assert model.grid == (1, 1)
    assert torch.isfinite(model(torch.randn(1, 3, 8, 9))).all()
