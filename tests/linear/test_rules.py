"""Every function in the tables: torch's values, and exactly linear."""

from __future__ import annotations

import pytest
from helpers.function_arguments import Constants, draw
from helpers.function_calls import calls, canonical, names
from oracles.euler import check

from captum_ssm.linear.functions import FROZEN

#: Roots and logarithms need positive numbers.
POSITIVE = {"sqrt", "log", "log2", "log10", "log1p", "rsqrt"}


@pytest.mark.parametrize("name", names())
def test_every_function_is_linear_or_frozen(name):
    x, constants = draw(name in POSITIVE), Constants()
    seen = set()
    for call in calls(name):
        found = check(lambda x, call=call: call(x, constants), [x])
        seen |= {canonical(function) for function in found.seen}
        assert found.is_live != (canonical(name) in FROZEN.split())
    assert canonical(name) in seen or name == "cuda", "torch does not call it so"
