"""Keep the tables of ``evaluate`` as the pages of results read them.

Usage: python bench/keep_tables.py RESULTS, where RESULTS is the folder that was given as ``--out``.
Tables that it does not hold stay as they are. With ``--add``, so do lines that it does not hold.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

TABLES = Path(__file__).resolve().parents[1] / "docs" / "results"


def main(folder: Path, tables: Path = TABLES, *, add: bool = False) -> None:
    """Copy the tables of a folder, or add their lines, and note when they were measured."""
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    known = tables / "measured.json"
    measured = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    for table in folder.glob("*.csv"):
        if add:
            _add(table, tables / table.name)
            measured.setdefault(table.stem, {})["added"] = machine["date"]
        else:
            shutil.copy(table, tables)
            measured[table.stem] = machine
    known.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _add(table: Path, known: Path) -> None:
    """Add lines to a table of the same columns, in the place of those of the same name."""
    with table.open(encoding="utf-8", newline="") as new, known.open(newline="") as old:
        found = [list(csv.reader(file)) for file in (old, new)]
    (head, *lines), (other, *added) = found
    if head != other:
        raise SystemExit(f"{known.name} has other columns than {table}. Measure all of it anew.")
    names = {tuple(line[:4]): line for line in (*lines, *added)}
    with known.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *names.values()])


if __name__ == "__main__":
    main(Path(sys.argv[1]), add="--add" in sys.argv)
