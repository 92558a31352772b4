"""Every function in the tables: torch's values, and exactly linear."""

from __future__ import annotations

import pytest
from helpers.function_arguments import Constants, draw
from helpers.function_calls import calls, canonical, names
from oracles.euler import check

from captum_ssm.linear.rules import FROZEN

#: Roots and logarithms need positive numbers.
POSITIVE = {"sqrt", "log", "log2", "log10", "log1p", "rsqrt"}


PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_every_function_is_linear_or_frozen(part):
    for name in names()[part::PARTS]:
        x, constants, seen = draw(name in POSITIVE), Constants(), set()
        for call in calls(name):
            found = check(lambda x, call=call, constants=constants: call(x, constants), [x])
            seen |= {canonical(function) for function in found.seen}
            assert found.is_live != (canonical(name) in FROZEN.split()), name
        assert canonical(name) in seen or name == "cuda", f"torch does not call it {name}"
