"""Tables that the command has written."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

KEYS = ("model", "method", "formulation", "row")


def read_table(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a table, numbers as numbers."""
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v if k in KEYS else float(v) for k, v in row.items()} for row in rows]
