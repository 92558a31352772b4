"""Disks that are full: a limit on the size of files stands for one.

The system's own calls fail midway, whichever library makes them.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from captum_ssm.errors import WriteError

ROOM = 100  # bytes that fit into a file


@contextmanager
def full_disk(room: int = ROOM) -> Iterator[None]:
    """No file may grow beyond ``room`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Everything below a folder."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def check_writer(write: Callable[[Path, int], None], folder: Path) -> None:
    """On a full disk it raises and leaves what was there; with room it goes on.

    Args:
        write: writes the results of some examples into a folder.
        folder: which is made.
    """
    folder.mkdir()
    write(folder, 1)
    before = contents(folder)
    assert before and any(len(data or b"") > ROOM for data in before.values())
    with full_disk(), pytest.raises(WriteError, match=f"{folder}.*could not be written: .*large"):
        write(folder, 2)
    assert contents(folder) == before
    write(folder, 2)
    assert contents(folder).keys() >= before.keys()


def check_no_folder(write: Callable[[Path, int], None], tmp_path: Path) -> None:
    """Where a file is in the place of the folder, it says so and leaves the file."""
    (tmp_path / "file").write_text("first")
    with pytest.raises(WriteError, match=r"file could not be written: .*name another place"):
        write(tmp_path / "file", 1)
    assert (tmp_path / "file").read_text() == "first"
