"""Read and write files: errors name the file, and a failed write leaves the old file unchanged."""

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
    """Create a folder with its parents, and check that files can be written in it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes to a file; if this fails, the old file is unchanged."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; the written file replaces ``path`` at the end.

    Raises:
        WriteError: if the file cannot be written; ``path`` is then unchanged.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    with writing(path):
        if target.exists() and not target.is_file():  # a device or pipe cannot be replaced
            yield target
        else:
            with _temporary_inside(target.parent) as temporary:
                yield temporary / target.name


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to; its files are moved to ``folder`` at the end.

    Raises:
        WriteError: if a file cannot be written; ``folder`` is then unchanged.
    """
    make_folder(folder)
    with writing(folder), _temporary_inside(folder) as temporary:
        yield temporary


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError inside the ``with`` to a WriteError with the path and a remedy."""
    try:
        yield
    except OSError as error:
        # in nested calls, the outermost path is the one that the user passed
        cause = error.__cause__ if isinstance(error, WriteError) else error
        raise WriteError(
            f"{path} could not be written: {getattr(cause, 'strerror', None) or cause}. Old files "
            "are unchanged. Free disk space, allow writing there, or pass a different path."
        ) from cause


@contextmanager
def _temporary_inside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside ``folder``; move its files up if the ``with`` succeeds."""
    with tempfile.TemporaryDirectory(prefix=".", dir=folder, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        yield temporary
        written = sorted(temporary.iterdir())
        for file in written:
            with file.open("rb+") as stream:  # write the content to disk before the new name
                os.fsync(stream.fileno())
        for file in written:
            file.replace(folder / file.name)


# --- reading ---------------------------------------------------------------------------------


def existing_folder(path: str | Path, contents: str) -> Path:
    """Return ``path`` if it is a folder; otherwise raise an error that asks for ``contents``."""
    folder = Path(path)
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise DataNotFoundError(f"{folder} {state}. Pass the folder that contains {contents}.")
    return folder


def existing_file(path: str | Path, wanted: str) -> Path:
    """Return ``path`` if it is a file; otherwise raise an error that asks for ``wanted``."""
    file = Path(path)
    if not file.is_file():
        state = "is not a file" if file.exists() else "does not exist"
        raise DataNotFoundError(f"{file} {state}. Pass {wanted}.")
    return file


def read_json(path: Path) -> Any:
    """Read a JSON file, and return its content.

    Raises:
        DataNotFoundError: if there is no such file.
        CheckpointError: if the file is not JSON.
    """
    if not path.is_file():
        raise DataNotFoundError(f"{path} does not exist. Pass a folder that contains {path.name}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Save or download it again.") from None


def read_safetensors(path: Path, need: str) -> dict[str, Tensor]:
    """Read a safetensors file, and return its tensors by name, on the CPU.

    Raises:
        DataNotFoundError: if there is no such file.
        CheckpointError: if the file does not have the size that its header declares.
        ImportError: if safetensors is not installed.
    """
    safetensors = optional("safetensors", '"captum-ssm[hf]"', need)
    if not path.is_file():
        raise DataNotFoundError(f"{path} does not exist. Pass a folder that contains {path.name}.")
    try:
        tensors: dict[str, Tensor] = import_module("safetensors.torch").load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {error}. Save or download it again."
        ) from error
    return tensors


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a text file; raise DataError if it does not have the given encoding."""
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not {encoding} text: byte {error.start} cannot be decoded. Pass a text "
            f"file in {encoding}."
        ) from None


def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """Return the lines of a text file without line ends; empty lines are included."""
    return read_text(path, encoding).removesuffix("\n").split("\n") if path.stat().st_size else []
