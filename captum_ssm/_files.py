"""Files: written whole or not at all, and read with errors that name the file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._optional import optional
from .errors import CheckpointError, DataError, DataNotFoundError, WriteError

if TYPE_CHECKING:
    from torch import Tensor


# --- writing ---------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Make a writable folder, and those above it: fail before the work, not after it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes to a file that holds either all of it or its old content."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as beside:
        beside.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, on the same disk; its file replaces ``path`` at the end.

    Raises:
        WriteError: when it cannot be written; ``path`` is then unchanged.
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
    """Yield a folder to write to, whose files replace the ones in ``folder`` at the end.

    Raises:
        WriteError: when a file cannot be written; ``folder`` is then unchanged.
    """
    make_folder(folder)
    with writing(folder), _moved_to(folder) as beside:
        yield beside


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file and advice in the system's errors of a failed write."""
    try:
        yield
    except OSError as error:
        # of files within files, the outermost is the one that the user knows
        cause = error.__cause__ if isinstance(error, WriteError) else error
        raise WriteError(
            f"{path} could not be written: {getattr(cause, 'strerror', None) or cause}. Old files "
            "are unchanged. Make room or give write permission there, or name another place."
        ) from cause


@contextmanager
def _moved_to(folder: Path) -> Iterator[Path]:
    """Yield a folder inside ``folder`` whose files move up when the ``with`` ends without error."""
    with tempfile.TemporaryDirectory(prefix=".", dir=folder, ignore_cleanup_errors=True) as made:
        beside = Path(made)
        yield beside
        written = sorted(beside.iterdir())
        for file in written:
            with file.open("rb+") as opened:  # a name must not reach the disk before its content
                os.fsync(opened.fileno())
        for file in written:
            file.replace(folder / file.name)


# --- reading ---------------------------------------------------------------------------------


def existing_folder(path: str | Path, holds: str) -> Path:
    """Return the folder, which must exist; ``holds`` names its contents in the error."""
    found = Path(path)
    if not found.is_dir():
        state = "is not a folder" if found.exists() else "does not exist"
        raise DataNotFoundError(f"{found} {state}. Pass the folder that holds {holds}.")
    return found


def existing_file(path: str | Path, what: str) -> Path:
    """Return the file, which must exist; ``what`` names it in the error."""
    found = Path(path)
    if not found.is_file():
        state = "is not a file" if found.exists() else "does not exist"
        raise DataNotFoundError(f"{found} {state}. Pass {what}.")
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Returns:
        The object.

    Raises:
        DataNotFoundError: when there is no such file.
        CheckpointError: when it is not JSON.
    """
    if not path.is_file():
        raise DataNotFoundError(f"{path} does not exist. Pass the folder that holds {path.name}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from None


def read_safetensors(path: Path, need: str) -> dict[str, Tensor]:
    """Return the weights of a file of safetensors, by name.

    Returns:
        The tensors on the CPU.

    Raises:
        DataNotFoundError: when there is no such file.
        CheckpointError: when its header does not fit it: sizes are checked before memory is taken.
        ImportError: when safetensors is not installed.
    """
    safetensors = optional("safetensors", '"captum-ssm[hf]"', need)
    if not path.is_file():
        raise DataNotFoundError(f"{path} does not exist. Pass the folder that holds {path.name}.")
    try:
        found: dict[str, Tensor] = import_module("safetensors.torch").load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole file of safetensors: {error}. Fetch or save it again."
        ) from error
    return found


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return all of a text file, in the encoding named, which must be its own."""
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not {encoding}: byte {error.start} cannot be read. Is it in another "
            "encoding, or another file?"
        ) from None


def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """Return the lines of a text file, in order, empty ones included, without their ends."""
    return read_text(path, encoding).removesuffix("\n").split("\n") if path.stat().st_size else []
