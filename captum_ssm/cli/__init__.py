"""The ``captum-ssm`` command: its parser, and what it says of errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from .. import __version__
from ..errors import CaptumSSMError
from . import architectures, demo, evaluate, explain, knockout, methods, serve, train
from .surroundings import quiet_libraries

#: Each adds its parser, which holds as ``run`` what is done with the options.
_COMMANDS = (demo, architectures, explain, knockout, methods, serve, evaluate, train)

#: Errors that speak for themselves; of others, their kind is told, and how to see where.
_EXPECTED = (CaptumSSMError, ValueError, ImportError, OSError)
_UNEXPECTED = " ({0}; captum-ssm --debug ... shows where)"
#: What a shell says of a program that nobody reads on, and of one that is interrupted.
_NOT_READ, _INTERRUPTED = 141, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code.

    Args:
        arguments: the command line without the program's name. Default: None, sys.argv.
    """
    try:
        try:
            return _run(_parser().parse_args(arguments))
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can be caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOT_READ


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="captum-ssm", description="Explain state-space and gated linear recurrent models."
    )
    parser.add_argument("--version", action="version", version=f"captum-ssm {__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks, and what libraries say"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _run(options: argparse.Namespace) -> int:
    try:
        with nullcontext() if options.debug else quiet_libraries():
            options.run(options)
    except BrokenPipeError:
        raise
    except Exception as error:
        if options.debug:
            raise
        hint = "" if isinstance(error, _EXPECTED) else _UNEXPECTED.format(type(error).__name__)
        print(f"captum-ssm: {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("captum-ssm: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0
