"""Silence other libraries during a command, and protect existing files."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from ..errors import OptionError

#: Environment variables that silence libraries, unless the user has set them.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide warnings and progress bars of other packages, but not of this package."""
    old_environment = dict(os.environ)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"captum_ssm\b")
        if "transformers" in sys.modules:
            _quiet_transformers(stack)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            yield
        finally:
            for name in _QUIET.keys() - old_environment.keys():
                del os.environ[name]


def _quiet_transformers(stack: ExitStack) -> None:
    """Silence messages and progress bars of transformers until the stack is closed."""
    logging = import_module("transformers.utils.logging")
    stack.callback(logging.set_verbosity, logging.get_verbosity())
    logging.set_verbosity_error()
    if logging.is_progress_bar_enabled():
        stack.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()


def add_force_to(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--force``, with which existing files are replaced."""
    parser.add_argument("--force", action="store_true", help="replace existing files")


def check_new(files: Iterable[Path], options: argparse.Namespace) -> None:
    """Raise if one of ``files`` exists, unless ``--force`` is set."""
    for file in () if options.force else files:
        if file.is_file():
            raise OptionError(
                f"{file} already exists. Pass a different --out, or --force to replace it."
            )
