"""Which session of pytest runs a test; CONTRIBUTING.md says how to ask for one.

The quick session takes of every folder the first cases in which every test is run, and every value
of every parameter is tried once. All other cases are marked ``full``. Tests of another session are
run there as a whole, so nothing is chosen among them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest

#: Folders whose tests all belong to one session, which has the folder's name.
ROOMS = ("bench", "browser", "fuzz", "interpreter")
#: Marks of cases that the quick session leaves to others, or cannot run without what they need.
OTHERS = ("slow", "full", *ROOMS, "processes", "gpu", "timm", "mambavision", "captum08")

#: A value of a parameter, or one row of values of several.
Value = tuple[tuple[str, ...], tuple[Hashable, ...]]


def full(*values: Any) -> list[Any]:
    """Values of a parameter that the quick session leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def thorough(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Values of a parameter, of which the quick session tries only some."""
    return [value if value in quick else full(value)[0] for value in values]


def thorough_rows(rows: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Rows of values of several parameters, of which the quick session tries only some."""
    return [row if row in quick else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def sampled(rows: Iterable[Any], step: int) -> list[Any]:
    """Values of a parameter, or rows of values, of which the quick session tries each ``step``-th.

    Args:
        rows: values, tuples of them, or what ``pytest.param`` makes of either.
        step: how many are passed over, and one more.
    """
    found = []
    for number, row in enumerate(rows):
        plain = row if type(row) is tuple else (row,)
        param = row if hasattr(row, "marks") else pytest.param(*plain)
        marks = [pytest.mark.slow] if number % step else []
        found.append(pytest.param(*param.values, id=param.id, marks=[*param.marks, *marks]))
    return found


def spread(rows: Iterable[Any]) -> list[Any]:
    """Rows of values, of which the quick session tries those that bring a new one to a column.

    Args:
        rows: tuples, or what ``pytest.param`` makes of them.
    """
    found, tried = [], set()
    for row in rows:
        param = pytest.param(*row) if type(row) is tuple else row
        values = set(enumerate(map(_key, param.values)))
        marks = () if values - tried else pytest.mark.slow
        found.append(pytest.param(*param.values, id=param.id, marks=marks))
        tried |= values
    return found


def share_out(items: Iterable[pytest.Item], tests: Path) -> None:
    """Mark every collected test with the session that runs it."""
    folders: dict[Path, list[pytest.Item]] = {}
    items = [item for item in items if item.path.is_relative_to(tests)]
    rooms = {item: item.path.relative_to(tests).parts[0] for item in items}
    # Where tests say themselves which of them are slow, nothing is chosen.
    said = {room for item, room in rooms.items() if item.get_closest_marker("slow")}
    for item, room in rooms.items():
        if room in ROOMS:
            item.add_marker(room)
        if room not in said and not any(item.get_closest_marker(name) for name in OTHERS):
            folders.setdefault(item.path.parent, []).append(item)
    for cases in folders.values():
        chosen = _each_value_once(cases)
        for item in cases:
            if item not in chosen:
                item.add_marker("full")


def _each_value_once(items: list[pytest.Item]) -> set[pytest.Item]:
    """Cases of one folder: one of every test, and more while they bring values not yet tried."""
    chosen: set[pytest.Item] = set()
    tried: set[Value] = set()
    tests: dict[str, list[tuple[pytest.Item, frozenset[Value]]]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        tests.setdefault(name, []).append((item, _values(item)))
    # in turn, so that the values are spread over the tests
    while tests:
        for name, cases in list(tests.items()):
            case, values = max(cases, key=lambda each: len(each[1] - tried))
            if values <= tried and any(each in chosen for each, _ in cases):
                del tests[name]
                continue
            chosen.add(case)
            tried |= values
    return chosen


def _values(item: pytest.Item) -> frozenset[Value]:
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    rows = [_names(mark) for mark in item.iter_markers("parametrize")]
    named = {name for row in rows for name in row}
    rows += [(name,) for name in params if name not in named]
    return frozenset((row, tuple(_key(params[name]) for name in row)) for row in rows)


def _names(parametrize: pytest.Mark) -> tuple[str, ...]:
    names = parametrize.args[0] if parametrize.args else parametrize.kwargs["argnames"]
    return tuple(x.strip() for x in names.split(",")) if isinstance(names, str) else tuple(names)


def _key(value: Any) -> Hashable:
    """The same for equal numbers and names, and for one and the same object."""
    return value if isinstance(value, (str, int, float, type(None))) else id(value)
