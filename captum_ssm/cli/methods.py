"""The subcommands ``captum-ssm methods`` and ``captum-ssm models``, which print lists."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the subcommands ``methods`` and ``models`` to the parser's subcommands."""
    parser = commands.add_parser(
        "methods",
        help="list the methods, their costs and their results",
        description="List the methods. Example: captum-ssm methods --markdown",
    )
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.set_defaults(run=run)
    about = "list the models that ship with the package"
    commands.add_parser("models", help=about, description=f"{about.capitalize()}.").set_defaults(
        run=list_models
    )


def list_models(_: argparse.Namespace) -> None:
    """Print a line for each bundled model: name, class, and size."""
    from ..models.bundled import BUNDLED, load_bundled

    for name in BUNDLED:
        model, words = load_bundled(name)
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}  {type(model).__name__}, {size:,} parameters, {len(words)} words")


def run(options: argparse.Namespace) -> None:
    """Print the table of methods."""
    from ..explain.methods import methods_table

    print(methods_table(options.markdown))
