"""``captum-ssm-bench train``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from captum_ssm.cli.surroundings import add_force_to, check_new


def add_to(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "train",
        help="make one of the small models or dictionaries again that come with the package",
        description="Train a model from scratch, save it and measure it. "
        "Example: captum-ssm-bench train copying-mamba2 --out copying-mamba2",
    )
    parser.add_argument(
        "name", metavar="NAME", help="such as copying-mamba2; any other word is answered with all"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    add_force_to(parser)
    parser.add_argument("--seed", type=int, default=0, help="of weights and data; 0 if left out")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from ..training.loop import recipe_of, train

    recipe_of(options.name)
    check_new(options.out.glob("*.safetensors"), options)
    train(options.name, options.out, options.seed, _print)


def _print(line: str) -> None:
    print(line, flush=True)
