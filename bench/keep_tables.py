"""Keep the tables of ``evaluate`` as the pages of results read them.

Usage: python bench/keep_tables.py RESULTS, where RESULTS is the folder that was given as ``--out``.
Tables that it does not hold stay as they are.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

TABLES = Path(__file__).resolve().parents[1] / "docs" / "results"


def main(folder: Path, tables: Path = TABLES) -> None:
    """Copy the tables of a folder, and note where and when they were measured."""
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    known = tables / "measured.json"
    measured = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    for table in folder.glob("*.csv"):
        shutil.copy(table, tables)
        measured[table.stem] = machine
    known.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
