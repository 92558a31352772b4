"""Reading data sets that others have laid out: what is missing or broken is named by its line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from ..errors import DataError, DataNotFoundError

Key = TypeVar("Key")
Item = TypeVar("Item")


class Lazy(Sequence[Item], Generic[Key, Item]):
    """Examples that are read when they are asked for, and not kept.

    Indexing reads an example, slicing gives another sequence of this kind and reads nothing.

    Args:
        keys: one for each example, such as its path.
        read: makes the example of a key.

    Example:
        >>> from captum_ssm.tasks.files import Lazy
        >>> examples = Lazy(["a", "b", "c"], str.upper)
        >>> len(examples), examples[0], list(examples[1:])
        (3, 'A', ['B', 'C'])
    """

    def __init__(self, keys: Sequence[Key], read: Callable[[Key], Item]) -> None:
        self.keys, self._read = keys, read

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Lazy[Key, Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Lazy[Key, Item]:
        if isinstance(index, slice):
            return Lazy(self.keys[index], self._read)
        return self._read(self.keys[index])


def folder(path: str | Path, holds: str) -> Path:
    """The folder, which must exist.

    Args:
        path: where it is.
        holds: what should be in it, for the error.
    """
    found = Path(path)
    if not found.is_dir():
        state = "is not a folder" if found.exists() else "does not exist"
        raise DataNotFoundError(f"{found} {state}. Pass the folder that holds {holds}.")
    return found


def file(path: str | Path, what: str) -> Path:
    """The file, which must exist.

    Args:
        path: where it is.
        what: what it is, for the error.
    """
    found = Path(path)
    if not found.is_file():
        state = "is not a file" if found.exists() else "does not exist"
        raise DataNotFoundError(f"{found} {state}. Pass {what}.")
    return found


def text(path: Path, encoding: str = "utf-8") -> str:
    """All of a text file, in the encoding named, which must be its own."""
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not {encoding}: byte {error.start} cannot be read. Is it in another "
            "encoding, or another file?"
        ) from None


def lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """The lines of a text file, in order, empty ones included, without their ends."""
    return text(path, encoding).removesuffix("\n").split("\n") if path.stat().st_size else []


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file that holds one a line, with the number of the line, from 1."""
    for number, line in enumerate(lines(path), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise broken(path, number, f"is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise broken(path, number, f"holds a {type(found).__name__}, not an object")
        yield number, found


def field(record: dict[str, Any], name: str, kind: type | tuple[type, ...], where: Where) -> Any:
    """A field of a record, which must be there and of its kind."""
    if name not in record:
        raise broken(*where, f"has no {name!r}; it has {sorted(record)}")
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise broken(*where, f"has a {type(value).__name__} as {name!r}")
    return value


#: A file and one of its lines.
Where = tuple[Path, int]


def broken(path: Path, number: int, what: str) -> DataError:
    """The error for a line that cannot be read."""
    return DataError(f"{path}, line {number} {what}.")


def optional(name: str, package: str, need: str) -> Any:
    """An optional package's module, imported at last.

    Args:
        name: of the module.
        package: what pip calls it.
        need: what it is needed for.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{need} needs {package}: pip install {package}") from error
