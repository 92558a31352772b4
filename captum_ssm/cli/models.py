"""``captum-ssm models``."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "models",
        help="list the models that ship with the package",
        description="List the models that ship with the package. Example: captum-ssm models",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from ..models.bundled import BUNDLED, load_bundled

    for name in BUNDLED:
        model, words = load_bundled(name)
        size = sum(each.numel() for each in model.parameters())
        print(f"{name}  {type(model).__name__}, {size:,} parameters, {len(words)} words")
