"""How many cases fuzz tests draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: One token, few, and a power of two or one more or less: where chunks and tiles end.
FEW = st.one_of(st.integers(1, 12), st.sampled_from([15, 16, 17, 31, 32, 33]))
MANY = st.sampled_from([63, 64, 65, 66, 96, 97, 127, 128, 129, 130, 150, 256, 257, 300])
LENGTHS = st.one_of(*[FEW] * 7, MANY)


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
