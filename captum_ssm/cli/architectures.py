"""The subcommand ``captum-ssm architectures``, which lists the supported mixers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..mixers import Architecture
    from ..mixers.table import Ability

#: Columns of the table; "generated text" is an ability of whole models, not of single mixers.
_ABILITIES: tuple[Ability, ...] = ("LatimFlow", "fold methods", "generated text")


def add_to(commands: Any) -> None:
    """Add the subcommand ``architectures`` to the parser's subcommands."""
    parser = commands.add_parser(
        "architectures",
        help="list the supported mixers",
        description="List the supported mixers. Example: captum-ssm architectures --markdown",
    )
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the table of architectures."""
    print(architectures_table(options.markdown))


def architectures_table(markdown: bool = False) -> str:
    """Return a table of the supported architectures, as aligned text or Markdown."""
    from ..mixers import supported_architectures

    head = ("family", "package", "tested with", *_ABILITIES, "mixer class")
    rows = [_table_row(entry, markdown) for entry in supported_architectures()]
    if markdown:
        lines = [head, ("---",) * len(head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in (head, *rows)
    )


def _table_row(entry: Architecture, markdown: bool) -> tuple[str, ...]:
    path = f"`{entry.class_path}`" if markdown else entry.class_path
    if not entry.tested_version:  # an adapter that the user registered
        return (entry.family, entry.package, "", *("" for _ in _ABILITIES), path)
    tested = f"{entry.tested_version}, {'the mixer alone' if entry.alone else 'whole models'}"
    abilities = (_ability_text(entry, ability) for ability in _ABILITIES)
    return (entry.family, entry.package, tested, *abilities, path)


def _ability_text(entry: Architecture, ability: Ability) -> str:
    """Return whether an architecture has an ability, and if not, the reason."""
    if ability in entry.lacks:
        return f"no: {entry.lacks[ability]}"
    return "not known" if entry.alone and ability == "generated text" else "yes"
