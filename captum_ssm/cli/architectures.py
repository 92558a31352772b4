"""``captum-ssm architectures``."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "architectures",
        help="list the supported mixers",
        description="List the supported mixers. Example: captum-ssm architectures --markdown",
    )
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    print(architectures_table(options.markdown))


def architectures_table(markdown: bool = False) -> str:
    """The supported architectures, one line each.

    Args:
        markdown: as a markdown table. Default: False, aligned columns.
    """
    from ..mixers import supported_architectures

    head = ("family", "package", "tested", "mixer class")
    rows = [
        (a.family, a.package, a.tested_version, f"`{a.class_path}`" if markdown else a.class_path)
        for a in supported_architectures()
    ]
    if markdown:
        lines = [head, ("---",) * 4, *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in (head, *rows)
    )
