"""Packages that are not needed by all, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(name: str, package: str, need: str) -> Any:
    """Import an optional module; the error names ``package`` for pip, and its ``need``."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{need} needs {package}: pip install {package}") from error
