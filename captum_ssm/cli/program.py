"""Run a program of several subcommands: parse arguments, print errors and return exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType

from ..errors import CaptumSSMError
from .surroundings import quiet_libraries

#: Errors that are printed as their message; other errors also have a type, and a hint on --debug.
_EXPECTED = (CaptumSSMError, ValueError, ImportError, OSError)
_UNEXPECTED = " ({0}; run {1} --debug ... for a traceback)"
_TORCHVISION = (
    " torchvision does not fit torch {0} ({1}). Install the torchvision of this release and build, "
    "or uninstall it: pip uninstall torchvision."
)
#: Exit codes for a closed pipe and for an interrupt, as in shells.
_NOT_READ, _INTERRUPTED = 141, 130


def run_program(
    parser: argparse.ArgumentParser,
    version: str,
    commands: Iterable[ModuleType],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse ``arguments``, run the subcommand that they name, and return the exit code."""
    parser.add_argument("--version", action="version", version=f"{parser.prog} {version}")
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks and messages of libraries"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        command.add_to(subparsers)
    try:
        try:
            return _run_command(parser.prog, parser.parse_args(arguments))
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is caught
    except BrokenPipeError:  # a second flush, when Python exits, must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOT_READ


def _run_command(program: str, options: argparse.Namespace) -> int:
    """Run the chosen subcommand; print errors, unless ``--debug`` is set; return the exit code."""
    try:
        with nullcontext() if options.debug else quiet_libraries():
            options.run(options)
    except BrokenPipeError:
        raise
    except Exception as error:
        if options.debug:
            raise
        kind = type(error).__name__
        hint = "" if isinstance(error, _EXPECTED) else _UNEXPECTED.format(kind, program)
        print(f"{program}: {error}{hint}{_torchvision_advice(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _torchvision_advice(error: BaseException | None) -> str:
    """Return advice if a torchvision that does not fit torch caused the error, else ``""``."""
    while error is not None:
        if "torchvision::" in str(error):
            import torch

            return _TORCHVISION.format(torch.__version__, error)
        error = error.__cause__ or error.__context__
    return ""
