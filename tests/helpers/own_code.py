"""Which code explains a mixer: its own under the rules, or its adapter's operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from captum_ssm.linear import reading
from captum_ssm.linear.network import Network
from captum_ssm.linear.reading import Reading


def even_if_slow(patch: pytest.MonkeyPatch) -> None:
    """Have mixers explained by their own code where a CPU is faster with their operators, too."""
    patch.setattr(reading, "_SLOW_ON_CPU", ())


def recorded(patch: pytest.MonkeyPatch) -> list[bool]:
    """A list that tells of each later call whether the mixer's own code explained it."""
    found: list[bool] = []
    own = Reading.explains

    def explains(reading: Reading, call: Any) -> bool:
        found.append(own(reading, call))
        return found[-1]

    patch.setattr(Reading, "explains", explains)
    return found


@contextmanager
def by_adapters() -> Iterator[None]:
    """Have mixers explained by their operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "_uses_own_code", lambda *_: False)
        yield
