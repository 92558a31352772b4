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
    rows = [_row(each, markdown) for each in supported_architectures()]
    if markdown:
        lines = [head, ("---",) * len(head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in (head, *rows)
    )


def _row(each: Architecture, markdown: bool) -> tuple[str, ...]:
    path = f"`{each.class_path}`" if markdown else each.class_path
    if not each.tested_version:  # an adapter that the user registered
        return (each.family, each.package, "", *("" for _ in _ABILITIES), path)
    tested = f"{each.tested_version}, {'the mixer alone' if each.alone else 'whole models'}"
    return (each.family, each.package, tested, *(_cell(each, x) for x in _ABILITIES), path)


def _cell(each: Architecture, ability: Ability) -> str:
    if ability in each.lacks:
        return f"no: {each.lacks[ability]}"
    return "not known" if each.alone and ability == "generated text" else "yes"
