"""The ``captum-ssm`` command: its parser, and what it says of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import CaptumSSMError
from . import architectures, demo, evaluate, explain, knockout, methods, serve, train

#: Each adds its parser, which holds as ``run`` what is done with the options.
_COMMANDS = (demo, architectures, explain, knockout, methods, serve, evaluate, train)

#: Errors that speak for themselves; of others, their kind is told, and how to see where.
_EXPECTED = (CaptumSSMError, ValueError, ImportError, OSError)
_UNEXPECTED = " ({0}; captum-ssm --debug ... shows where)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code.

    Args:
        arguments: the command line without the program's name. Default: None, sys.argv.
    """
    parser = argparse.ArgumentParser(
        prog="captum-ssm", description="Explain state-space and gated linear recurrent models."
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except Exception as error:
        if options.debug:
            raise
        hint = "" if isinstance(error, _EXPECTED) else _UNEXPECTED.format(type(error).__name__)
        print(f"captum-ssm: {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("captum-ssm: interrupted", file=sys.stderr)
        return 130
    return 0
