"""How many cases fuzz tests draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def cases(quick: int, long: int) -> int:
    """How many cases a test draws.

    Args:
        quick: how many by default.
        long: how many with --hypothesis-profile=long.
    """
    return long if settings.get_current_profile_name() == "long" else quick


def fuzz(quick: int, long: int) -> Callable[[Any], Any]:
    """Marks a test of random cases, and says how many it draws.

    Args:
        quick, long: as for :func:`cases`.
    """
    count = cases(quick, long)

    def mark(test: Any) -> Any:
        # large cases take long to draw, and are wanted
        drawn = settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])
        return pytest.mark.slow(drawn(test))

    return mark
