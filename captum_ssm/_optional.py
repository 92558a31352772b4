"""Import optional packages, and modules of this package, when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def optional(name: str, package: str, need: str) -> Any:
    """Import an optional module that the feature ``need`` uses, or ask to install ``package``."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{need} needs {package}: pip install {package}") from error


def on_first_use(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports the module of a public name.

    Args:
        package: the package, which is imported without the modules of its names.
        places: public names, separated by spaces, by their module in the package.
    """
    module_of = {name: module for module, names in places.items() for name in names.split()}

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{module_of[name]}", package), name)
        setattr(sys.modules[package], name, value)  # found without __getattr__ from now on
        return value

    return import_name
