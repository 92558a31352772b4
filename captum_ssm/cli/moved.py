"""Commands that another distribution has: ``captum-ssm evaluate`` and ``captum-ssm train``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_MOVED = ("evaluate", "train")
_WHERE = (
    "captum-ssm: {0} is a command of captum-ssm-bench, which is installed from the folder bench "
    "of the repository."
)


def add_to(commands: Any) -> None:
    """Add the commands to the subparsers, without help; each takes whatever it is given."""
    for name in _MOVED:
        parser = commands.add_parser(name, prefix_chars="\0", add_help=False)
        parser.add_argument("rest", nargs="*")
        parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Say where the command is now."""
    print(_WHERE.format(options.command), file=sys.stderr)
    raise SystemExit(2)
