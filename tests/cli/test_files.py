"""Disks that are full and folders that cannot be written to: clear errors, and old files whole.

A limit on the size of files takes the place of a full disk, whichever library writes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from helpers.full_disk import ROOM, contents, full_disk
from helpers.marks import slow_but
from zoo.small import mamba_lm, token_ids

from captum_ssm import ImplicitAttentionRollout, report
from captum_ssm._files import filling, make_folder, replacing, write_whole
from captum_ssm.attr import Comparison
from captum_ssm.cli import main
from captum_ssm.errors import CaptumSSMError, WriteError


def test_the_file_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    for content in ("ä" * ROOM, b"\xff" * (ROOM + 1)):
        write_whole(path, "first ä")
        with full_disk(), pytest.raises(OSError, match=r"table\.md could not .*unchanged"):
            write_whole(path, content)
        with pytest.raises(UnicodeEncodeError):
            write_whole(path, "second \ud800")
        with pytest.raises(KeyboardInterrupt), replacing(path) as beside:
            beside.write_text("half")
            raise KeyboardInterrupt
        assert contents(tmp_path) == {path: "first ä".encode()}
        write_whole(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_odd_places(tmp_path: Path, run: Callable[..., str]) -> None:
    """A device, a link and new files are written as any program writes them; a folder is not."""
    with pytest.raises(WriteError, match="/dev/full could not be written: No space left on device"):
        write_whole(Path("/dev/full"), "text")
    assert Path("/dev/full").is_char_device()
    real, link, file = (tmp_path / name for name in ("real", "link", "any"))
    link.symlink_to(real)
    write_whole(link, "text")
    assert link.is_symlink() and real.read_text() == "text"
    file.write_text("text")
    assert real.stat().st_mode == file.stat().st_mode
    with pytest.raises(WriteError, match="could not be written: Is a directory"):
        write_whole(tmp_path, "text")
    for below in (file, file / "folder"):
        for write in (make_folder, lambda p: write_whole(p / "x", "text")):
            with pytest.raises(WriteError, match=f"{below}.* could not be written") as caught:
                write(below)
            assert isinstance(caught.value, OSError | CaptumSSMError)
        with pytest.raises(WriteError, match=str(below)), filling(below):
            pass
    asked = ["explain", "recall-mamba", "--text", "anna", "--out", file / "x.json"]
    for arguments in (["demo", "--out", file], asked):
        assert f"captum-ssm: {file}" in run(*arguments, code=1)
    assert file.read_text() == "text"


def explained(path: Path, examples: int) -> None:
    """The command; its message as an error."""
    given = ["--text", *["anna owns the"] * examples, "--method", "ImplicitAttentionRollout"]
    with redirect_stdout(io.StringIO()):
        main(["--debug", "explain", "recall-mamba", *given, "--out", str(path), "--force"])


#: What is written into a folder, of so many examples.
WRITERS: dict[str, Callable[[Path, int], object]] = {
    "json": lambda folder, n: Comparison({"0": torch.zeros(n, 99)}).save(folder / "found.json"),
    "explain": lambda folder, n: explained(folder / "found.json", n),
    "report": lambda folder, n: report(
        mamba_lm(), token_ids(n, 5), [ImplicitAttentionRollout], matrices=False,
        target=(-1, 3), path=folder / "page.html",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", slow_but(("json",), WRITERS))
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    write, folder = WRITERS[kind], tmp_path / "results"
    folder.mkdir()
    write(folder, 1)
    before = contents(folder)
    assert before and any(len(data or b"") > ROOM for data in before.values())
    with full_disk(), pytest.raises(WriteError, match=f"{folder}.*could not be written: .*large"):
        write(folder, 2)
    assert contents(folder) == before
    write(folder, 2)
    assert contents(folder).keys() >= before.keys()
    (tmp_path / "file").write_text("first")
    with pytest.raises(WriteError, match=r"file could not be written: .*pass a different path"):
        write(tmp_path / "file", 1)
    assert (tmp_path / "file").read_text() == "first"
