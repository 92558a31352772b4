"""Files that are written whole or not at all, and errors that say which one could not be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import WriteError


def make_folder(folder: Path) -> None:
    """Make a folder that can be written to: fail before the work, not after it.

    Args:
        folder: where files are to go; made if it is missing, as are those above it.

    Raises:
        WriteError: when it cannot be made, or nothing can be written in it.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it holds either all of the content or what it held before.

    Args:
        path: the file.
        content: a text, written as UTF-8, or bytes.

    Raises:
        WriteError: when it cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as beside:
        beside.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file that takes the place of ``path`` once it is written whole.

    Args:
        path: the file; of a link, what it leads to.

    Yields:
        The path to write to instead: a file of the same name, on the same disk.

    Raises:
        WriteError: when it cannot be written; ``path`` then is what it was.
    """
    real = Path(os.path.realpath(path))
    with writing(path):
        if real.exists() and not real.is_file():  # no place of a device or pipe can be taken
            yield real
        else:
            with _moved_to(real.parent) as beside:
                yield beside / real.name


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder whose files go to ``folder`` together, once all of them are written whole.

    Args:
        folder: where they go, in place of files of the same names; made if it is missing.

    Yields:
        The folder to write to instead.

    Raises:
        WriteError: when a file cannot be written; those of ``folder`` then are what they were.
    """
    make_folder(folder)
    with writing(folder), _moved_to(folder) as beside:
        yield beside


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let what the system says of a failed write name the file, and what to do.

    Args:
        path: what is written.

    Raises:
        WriteError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        # of files within files, the outermost is the one that the user knows
        cause = error.__cause__ if isinstance(error, WriteError) else error
        raise WriteError(
            f"{path} could not be written: {getattr(cause, 'strerror', None) or cause}. What was "
            "there before is unchanged. Make room or give write permission there, or name another "
            "place."
        ) from cause


@contextmanager
def _moved_to(folder: Path) -> Iterator[Path]:
    """A folder inside ``folder`` whose files are moved up when the ``with`` ends without error."""
    with tempfile.TemporaryDirectory(prefix=".", dir=folder, ignore_cleanup_errors=True) as made:
        beside = Path(made)
        yield beside
        written = sorted(beside.iterdir())
        for file in written:
            with file.open("rb+") as opened:  # a name must not reach the disk before its content
                os.fsync(opened.fileno())
        for file in written:
            file.replace(folder / file.name)
