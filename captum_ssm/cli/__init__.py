"""The command ``captum-ssm``; each module of this package defines one of its subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import __version__
from . import architectures, demo, estimate, explain, knockout, methods, serve
from .program import run_program

_COMMANDS = (demo, architectures, explain, knockout, methods, estimate, serve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, default ``sys.argv[1:]``; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="captum-ssm", description="Explain state-space and gated linear recurrent models."
    )
    return run_program(parser, __version__, _COMMANDS, arguments)
