"""Import of optional packages, on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(name: str, package: str, need: str) -> Any:
    """Import an optional module; if it is missing, the error asks to install ``package``."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{need} needs {package}: pip install {package}") from error
