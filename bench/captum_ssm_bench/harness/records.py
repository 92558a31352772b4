"""Results on disk: one line per example and cell, appended as they are measured.

A line counts once it ends.  A run that was killed leaves at most one line without an end: readers
skip it, and the next append removes it.  What is recorded is never measured again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from captum_ssm._files import make_folder, writing
from captum_ssm.errors import InputError

#: The numbers of one row of one example, by name; NaN for one that it does not have.
Numbers = Mapping[str, float]
#: Numbers by row: of each layer, say, or of an empty name where there is one row only.
Rows = Mapping[str, Numbers]


class Key(NamedTuple):
    """The experiment, model, method, formulation, seed and index of a result."""

    experiment: str
    model: str
    method: str
    formulation: str
    seed: int
    example: int


class Records:
    """The results in a folder.

    Iterating gives every result once, as a key and its rows, sorted by key.

    Args:
        folder: where they lie; made if it is not there.

    Raises:
        InputError: on iteration, when a line is not a result; it names the line.
    """

    def __init__(self, folder: str | Path) -> None:
        make_folder(Path(folder))
        self._path = Path(folder) / "records.jsonl"

    def __iter__(self) -> Iterator[tuple[Key, Rows]]:
        """Every result once, sorted by key."""
        found: dict[Key, Rows] = {}
        for key, rows in _lines(self._path) if self._path.exists() else ():
            found.setdefault(key, rows)
        yield from sorted(found.items(), key=lambda item: item[0])

    def append(self, key: Key, rows: Rows) -> None:
        """Write a result; it is on the disk when the call returns.

        Raises:
            WriteError: when it cannot be written; results written before are unharmed.
        """
        written = {row: _writable(numbers) for row, numbers in rows.items()}
        line = json.dumps({**key._asdict(), "rows": written}) + "\n"
        with writing(self._path):
            _mend(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())


def _writable(numbers: Numbers) -> dict[str, float | None]:
    """JSON knows no NaN: a number that an example does not have is null."""
    return {name: None if math.isnan(x) else float(x) for name, x in numbers.items()}


def _read(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if x is None else float(x) for name, x in numbers.items()}


def _lines(path: Path) -> Iterator[tuple[Key, Rows]]:
    text = path.read_text(encoding="utf-8")
    for count, line in enumerate(text.split("\n")[:-1], 1):  # the last is empty, or was cut off
        try:
            entry = json.loads(line)
            rows = entry.pop("rows")
            yield Key(**entry), {row: _read(numbers) for row, numbers in rows.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"{path}, line {count} is not a result: {line[:80]!r}. Delete the line; what it "
                "held is measured again."
            ) from error


def _mend(path: Path) -> None:
    """Remove a last line without an end."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
