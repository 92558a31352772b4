"""Parameters of tests, of which only some are quick."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Mark the values of a parameter as slow, except the quick ones."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in values]
