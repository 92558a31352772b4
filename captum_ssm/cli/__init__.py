"""The ``captum-ssm`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import CaptumSSMError
from . import evaluate, explain, serve, train

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

    demo = commands.add_parser(
        "demo",
        help="explain the bundled trained Mamba model and write pictures",
        description="Explain the bundled trained Mamba model. Example: captum-ssm demo --out demo",
    )
    demo.add_argument("--prompt", help="a prompt of the model's task; see the model's card")
    demo.add_argument(
        "--out", type=Path, default=Path("captum-ssm-demo"), help="folder for the pictures"
    )
    architectures = commands.add_parser(
        "architectures",
        help="list the supported mixers",
        description="List the supported mixers. Example: captum-ssm architectures --markdown",
    )
    architectures.add_argument("--markdown", action="store_true", help="print a markdown table")
    explain.add_to(commands)
    serve.add_to(commands)
    evaluate.add_to(commands)
    train.add_to(commands)

    options = parser.parse_args(arguments)
    try:
        if options.command == "demo":
            from .demo import run

            run(options.prompt, options.out)
        elif options.command == "explain":
            explain.run(options)
        elif options.command == "serve":
            serve.run(options)
        elif options.command == "methods":
            from ..explain.methods import methods_table

            print(methods_table(options.markdown))
        elif options.command == "evaluate":
            evaluate.run(options)
        elif options.command == "train":
            train.run(options)
        else:
            print(architectures_table(options.markdown))
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
