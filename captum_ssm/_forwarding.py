"""Modules and names that have moved, found where they are now when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def forward(module: str, *places: str) -> Callable[[str], Any]:
    """What a module needs as its ``__getattr__`` to offer the public names of others.

    Args:
        module: its name, for the error.
        *places: the modules that have the names now, below ``captum_ssm``; the first that lists a
            name in its ``__all__`` is asked. They are imported with the first name.

    Returns:
        A function from a name to what bears it; ``"__all__"`` gives all names.

    Example:
        >>> from captum_ssm._forwarding import forward
        >>> forward("captum_ssm.old", "models")("WordVocabulary")
        <class 'captum_ssm.models.vocabulary.WordVocabulary'>
    """

    def find(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # importers and inspectors ask for these
            raise _missing(module, name)
        modules = [import_module(f".{place}", __package__) for place in places]
        if name == "__all__":
            return sorted({each for found in modules for each in found.__all__})
        for found in modules:
            if name in found.__all__:
                return getattr(found, name)
        raise _missing(module, name)

    return find


def moved(old: str, place: str) -> ModuleType:
    """A module that can be imported by its earlier name, and has all that it has now.

    Args:
        old: the earlier name, whole.
        place: the module now, below ``captum_ssm``; it is imported with the first name.

    Returns:
        A module that asks the one there for everything.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):  # whoever walks through all modules asks for these
            raise _missing(old, name)
        return getattr(import_module(f".{place}", __package__), name)

    stand_in = ModuleType(old, f"What is now captum_ssm.{place}.")
    stand_in.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[old] = stand_in
    return stand_in


def _missing(module: str, name: str) -> AttributeError:
    return AttributeError(f"module {module!r} has no attribute {name!r}")
