"""``captum-ssm methods``."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "methods",
        help="list the methods, what they cost and what they say",
        description="List the methods. Example: captum-ssm methods --markdown",
    )
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from ..explain.methods import methods_table

    print(methods_table(options.markdown))
