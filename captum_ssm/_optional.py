"""Import optional packages when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(name: str, package: str, need: str) -> Any:
    """Import an optional module that the feature ``need`` uses, or ask to install ``package``."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{need} needs {package}: pip install {package}") from error
