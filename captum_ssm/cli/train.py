"""``captum-ssm train``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CHANGES = ("steps", "layers", "hidden", "state")


class _Names:
    """The names of the recipes, read when they are asked for: torch takes long to import."""

    def __contains__(self, name: object) -> bool:
        return name in _recipes()

    def __iter__(self) -> Iterator[str]:
        return iter(_recipes())


def _recipes() -> Mapping[str, Any]:
    from ..bench.training.recipes import every_recipe

    return every_recipe()


def add_to(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "train",
        help="make one of the small models or dictionaries again that come with the package",
        description="Train a model from scratch, save it and measure it. "
        "Example: captum-ssm train copying-mamba2 --out copying-mamba2",
    )
    parser.add_argument("name", choices=_Names(), metavar="NAME", help="%(choices)s")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data; 0 if left out")
    changes = parser.add_argument_group("changes to the recipe")
    for name in _CHANGES:
        changes.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from ..bench.training.loop import train

    changes = {name: value for name, value in vars(options).items() if name in _CHANGES}
    train(options.name, options.out, options.seed, _print, **changes)


def _print(line: str) -> None:
    print(line, flush=True)
