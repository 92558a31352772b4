"""The ``captum-ssm-bench`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from captum_ssm import __version__
from captum_ssm.cli.program import run_program

from . import evaluate, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code.

    Args:
        arguments: the command line without the program's name. Default: None, sys.argv.
    """
    parser = argparse.ArgumentParser(
        prog="captum-ssm-bench",
        description="Measure explanations on trained models whose right answers are known.",
    )
    return run_program(parser, __version__, (evaluate, train), arguments)
