"""Every kind of operator keeps the contract, for drawn sizes, rows and lags."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from operators.kinds import KINDS
from operators.small_blocks import blocks

from captum_ssm import operators
from captum_ssm.operators import Operator, Shape

#: Those that plain pytest tries; all kinds are drawn by the slow tests.
QUICK = [
    *("diagonal", "conv both ways", "long conv", "permute", "given", "softmax", "running sum"),
    *("scalar decay of groups", "scan", "elementwise", "sum", "windows", "long conv in gates"),
]
#: Chunks and tiles end at powers of two; the first length crosses the border of a chunk.
LENGTHS = st.sampled_from([66, 1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 97, 130])
LAGS = st.lists(st.integers(-5, 9) | st.integers(-40, 40), min_size=1, max_size=3, unique=True)
SEEDS = st.integers(0, 2**31 - 1)
#: The message names the clause that failed; a smaller case of it is not worth the time.
DRAWN = (Phase.explicit, Phase.generate)


def check(
    kind: str, heads: int, per_head: int, tokens: int, small: bool, **options: object
) -> None:
    build, single = KINDS[kind]
    case = build(Shape(2, tokens, heads, 1 if single else per_head))
    with blocks(small):
        case.check(**options)


@pytest.mark.parametrize("kind", QUICK)
def test_contract(kind: str) -> None:
    heads = 4 if "groups" in kind else 3
    check(kind, heads, per_head=2, tokens=9, small=True)


@pytest.mark.slow
@settings(max_examples=2, phases=DRAWN)
@given(st.data(), LENGTHS, st.integers(2, 4), st.sampled_from([2, 1, 3]), SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_contract_of_any_size(
    kind: str, data: st.DataObject, tokens: int, heads: int, per_head: int, seed: int
) -> None:
    """Small blocks let short inputs cross their borders."""
    start = data.draw(st.integers(0, tokens - 1))
    rows = range(start, tokens - data.draw(st.integers(0, tokens - start - 1)))
    torch.manual_seed(seed)
    small = tokens < 40 and data.draw(st.booleans())
    check(kind, heads, per_head, tokens, small, rows=[rows], lags=data.draw(LAGS), seed=seed)


def test_every_class_is_checked() -> None:
    for module in pkgutil.walk_packages(operators.__path__, f"{operators.__name__}."):
        import_module(module.name)
    made = [build(Shape(2, 3, 4, 1)).operator for build, _ in KINDS.values()]
    held = {type(x) for operator in made for x in (operator, *operator.leaves())}
    assert set(classes(Operator)) <= held, "add a row to KINDS"


def classes(base: type[Operator]) -> Iterator[type[Operator]]:
    """The package's classes of operators that are no bases of others."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith(operators.__name__):
            yield from classes(kind) if kind.__subclasses__() else [kind]
