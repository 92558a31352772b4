"""Disks that are full: a limit on the size of files stands for one.

The system's own calls fail midway, whichever library makes them.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
