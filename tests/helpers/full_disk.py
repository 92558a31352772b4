"""A limit on the size of files in place of a full disk: the system's own calls fail midway."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Bytes that fit into a file.
ROOM = 100


@contextmanager
def full_disk(room: int = ROOM) -> Iterator[None]:
    """Keep every file from growing beyond ``room`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return everything below a folder."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}
