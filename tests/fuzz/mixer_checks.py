"""Mixers of random configurations under the contract of adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.fuzzing import fuzz
from helpers import contract
from hypothesis import given
from hypothesis import strategies as st

BOOL, FEW, KERNEL = st.booleans(), st.integers(1, 4), st.integers(1, 5)
#: Added to mean squares, so that norms of few features do not blow rounding errors up.
EPS = 0.05
BOTH = ("left", "right")
#: A few tokens of an input, and now and then many.
TOKENS = st.one_of(st.integers(3, 12), st.integers(3, 12), st.integers(60, 80))
SEEDS = st.integers(0, 2**31 - 1)

#: Options to a mixer, the width of its input and what :func:`check` is told.
Make = Callable[[dict[str, Any]], tuple[Any, int, dict[str, Any]]]
#: What options are drawn from.
Drawn = dict[str, st.SearchStrategy[Any]]


def check(
    mixer: Any,
    width: int,
    tokens: int,
    sides: tuple[str, ...] = (),
    upcast: bool = True,
    **arguments: Any,
) -> None:
    """The contract's clauses on an operator, but for those that the mixer does not keep.

    Args:
        mixer: with random parameters.
        width, tokens: of its input.
        sides: on which padding changes nothing. Default: it takes no mask.
        upcast: whether the module runs in bfloat16 and can be compared with itself in float32,
            which no module can whose buffers are rounded.
        **arguments: passed to it.
    """
    unkept = {name for name in contract.PADDING if name.split()[0] not in sides}
    unkept |= set() if upcast else {"bfloat16"}
    clauses = [name for name in contract.CORE if name not in unkept]
    contract.holds(mixer, width, tokens=tokens, masked=bool(sides), clauses=clauses, **arguments)


def fuzzed(subjects: dict[str, tuple[Drawn, Make]]) -> Any:
    """A test of mixers by name, of options that are drawn."""

    @pytest.mark.parametrize("name", subjects)
    @fuzz(quick=2, long=50)
    @given(data=st.data(), tokens=TOKENS, seed=SEEDS)
    def test(name: str, data: st.DataObject, tokens: int, seed: int) -> None:
        options, make = subjects[name]
        chosen = data.draw(st.fixed_dictionaries(options), label="options")
        torch.manual_seed(seed)
        mixer, width, told = make(chosen)
        check(mixer, width, tokens, **told)

    return test
