"""Rows of figures as a markdown table, and on disk."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def markdown(rows: Sequence[Row], header: bool = True) -> str:
    """The rows as a markdown table."""
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])] if header else []
    lines += [" | ".join(_cell(v) for v in row.values()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as csv, as the pages show them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.3g}"
    return "" if value is None else str(value)
