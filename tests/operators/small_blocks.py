"""Blocks of few elements, so that small operators are worked on in many pieces."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import pytest

from captum_ssm import operators

#: How many elements, tokens, columns or channels blocks have, by how constants' names end.
_SIZES = {
    "ELEMENTS": 40,
    "CHUNK": 8,
    "SHORT": 4,
    "HELD": 16,
    "TOKENS": 4,  # runs of tokens are halved
    "COLUMNS": 3,
    "ROWS": 3,
    "RUN": 2,
    "LEAST": 2,
    "MOST": 4,
    "FEWEST": 1,
}


@contextmanager
def blocks(small: bool) -> Iterator[None]:
    """Until the context ends, everything is done in small pieces; if not ``small``, as ever."""
    if not small:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in _constants():
            patch.setattr(module, name, size)
        yield


@cache
def _constants() -> list[tuple[ModuleType, str, int]]:
    """Every constant that sizes blocks, wherever it is imported, and what it is set to."""
    found = []
    for info in pkgutil.walk_packages(operators.__path__, f"{operators.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            size = _SIZES.get(name.rpartition("_")[2])
            if size is not None and isinstance(value, int):
                found.append((module, name, size))
    assert len(found) > 15, "the constants have other names"
    return found
