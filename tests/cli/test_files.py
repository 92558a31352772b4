"""Disks that are full and folders that cannot be written to: clear errors, and old files whole."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.full_disk import ROOM, check_no_folder, check_writer, contents, full_disk
from zoo.small import mamba_lm, token_ids

from captum_ssm import report
from captum_ssm._files import filling, make_folder, replacing, write_whole
from captum_ssm.attr import Comparison
from captum_ssm.cli import main
from captum_ssm.errors import CaptumSSMError, WriteError
from captum_ssm.models import VisionMamba, folders
from captum_ssm.models.vocabulary import WordVocabulary

# --- the helpers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["ä" * ROOM, b"\xff" * (ROOM + 1)])
def test_the_file_is_what_it_was(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "table.md"
    with full_disk(), pytest.raises(WriteError, match=r"table\.md could not .*too large"):
        write_whole(path, content)
    assert not list(tmp_path.iterdir())
    write_whole(path, "first ä")
    before = contents(tmp_path)
    with full_disk(), pytest.raises(OSError, match="unchanged"):
        write_whole(path, content)
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "second \ud800")
    with pytest.raises(KeyboardInterrupt), replacing(path) as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == before and path.read_bytes() == "first ä".encode()
    write_whole(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_device_is_written_to_and_not_replaced() -> None:
    with pytest.raises(WriteError, match="/dev/full could not be written: No space left on device"):
        write_whole(Path("/dev/full"), "text")
    assert Path("/dev/full").is_char_device()


def test_a_link_leads_to_the_same_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "folder" / "link"
    link.parent.mkdir()
    link.symlink_to(real)
    write_whole(link, "text")
    assert link.is_symlink() and real.read_text() == "text"


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "ours", "text")
    (tmp_path / "any").write_text("text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize("below", ["file", "file/folder"])
def test_no_folder_can_be_there(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("first")
    place = tmp_path / below
    for write in (make_folder, lambda p: write_whole(p / "x", "text")):
        with pytest.raises(WriteError, match=f"{below}.* could not be written") as caught:
            write(place)
        assert isinstance(caught.value, OSError | CaptumSSMError)
    with pytest.raises(WriteError, match=below), filling(place):
        pass
    assert (tmp_path / "file").read_text() == "first"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(WriteError, match="folder could not be written: Is a directory"):
        write_whole(tmp_path / "folder", "text")


def test_files_of_a_folder_come_together(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with filling(folder) as beside:
        write_whole(beside / "a", "first")
        write_whole(beside / "b", "first")
    write_whole(folder / "other", "first")
    before = contents(folder)
    with full_disk(), pytest.raises(WriteError) as caught, filling(folder) as beside:
        write_whole(beside / "a", "second")
        write_whole(beside / "b", "second" * ROOM)
    assert contents(folder) == before
    assert str(caught.value).startswith(f"{folder} could not be written: File too large.")
    with filling(folder) as beside:
        write_whole(beside / "a", "second")
    assert contents(folder) == before | {folder / "a": b"second"}


# --- everything that writes ----------------------------------------------------------------------


def saved(folder: Path, examples: int) -> None:
    Comparison({"zero": torch.zeros(examples, 99)}).to_json(folder / "found.json")


def page(folder: Path, examples: int) -> None:
    report(mamba_lm(), token_ids(examples, 5), target=(-1, 3), path=folder / "page.html")


def explained(ending: str) -> Callable[[Path, int], None]:
    def write(folder: Path, examples: int) -> None:
        out = ["--out", str(folder / f"found{ending}")]
        asked = ["explain", "recall-mamba", "--text", *["anna owns the"] * examples, *out]
        command(*asked, "--method", "ImplicitAttentionRollout")

    return write


def demo(folder: Path, examples: int) -> None:
    command("demo", "--out", str(folder))


def command(*arguments: str) -> None:
    """The command; its message as an error."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.setattr("captum_ssm.cli.demo._SCORED", 2)
        main(["--debug", *arguments, "--force"])


def vocabulary(folder: Path, examples: int) -> None:
    WordVocabulary([f"word{i}" for i in range(100 * examples)]).to_json(folder / "vocab.json")


def plain_model(folder: Path, examples: int) -> None:
    settings: dict[str, Any] = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 6}
    folders.save_plain(VisionMamba(**settings, num_classes=3, d_state=2), settings, folder)


#: What is written, and where it takes long, the session that writes it.
WRITERS = {
    page: (),
    saved: (),
    explained(".json"): (),
    **{explained(ending): pytest.mark.full for ending in (".html", ".png")},
    demo: pytest.mark.full,
    vocabulary: (),
    plain_model: (),
}


@pytest.mark.parametrize("write", [pytest.param(w, marks=m) for w, m in WRITERS.items()])
def test_a_full_disk(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    check_writer(write, tmp_path / "results")


@pytest.mark.parametrize("write", [w for w in WRITERS if w != vocabulary])
def test_a_place_that_is_no_folder(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    check_no_folder(write, tmp_path)


@pytest.mark.parametrize("room", [ROOM, 2000])
def test_a_full_disk_under_weights_of_transformers(tmp_path: Path, room: int) -> None:
    """The first file does not fit, or its weights, which a library of Rust writes."""
    with full_disk(room), pytest.raises(WriteError, match=f"{tmp_path} could not .*too large"):
        folders.save_of_transformers(mamba_lm(), tmp_path)


def test_the_command_says_so_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("first")
    for arguments in (
        ["demo", "--out", str(tmp_path / "file")],
        ["explain", "recall-mamba", "--text", "anna", "--out", str(tmp_path / "file" / "x.json")],
    ):
        assert main(arguments) == 1
        assert f"captum-ssm: {tmp_path / 'file'}" in capsys.readouterr().err
