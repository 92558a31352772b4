"""Every method on random networks of real mixers, held to dense matrices of the same run.

What networks are, and the functions around them, is known and never found out: which mixer reads
what, in which order of the tokens, what its output is added to, what hooks, adapters, other weights
and virtual tokens make of it.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from fuzz.wrapper_checks import METHODS, check
from fuzz.wrappers import draw
from hypothesis import settings

from captum_ssm.attr import catalogue

pytestmark = pytest.mark.slow

#: They follow a network whatever it is; all others fold layers.
FOLLOWING = {"LatimFlow", "MambaLRP"}
PARTS = 4


def test_no_method_is_forgotten() -> None:
    assert {entry.name for entry in catalogue.METHODS} == METHODS.keys()


@pytest.mark.parametrize("part", range(PARTS))
def test_explained_as_they_are_or_refused(part: int, seed: int) -> None:
    many = settings.get_current_profile_name() == "long"  # by --hypothesis-profile=long
    random, count = Random(f"{seed} {part}"), 2000 // PARTS if many else 5
    refused: Counter[str] = Counter()
    networks = 0
    for _ in range(count):
        drawn = draw(random)
        reasons = check(drawn)
        unfoldable = drawn.twice or any(spec[0] == "Branches" for spec in drawn.blocks)
        assert not unfoldable or METHODS.keys() - FOLLOWING <= reasons.keys(), drawn
        refused.update(reasons.values())
        networks += bool(reasons)
    print(f"{count} networks, of which {networks} were refused by a method: {dict(refused)}")
    assert networks <= max(3, count // 4)
