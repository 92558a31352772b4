"""The checker of docstrings finds each kind of gap."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "check_docstrings.py"

COMPLETE = '''
"""Nothing is missing here."""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import NamedTuple

#: One half.
HALF = 0.5
Numbers = list[float]  #: some numbers


class Problem(ValueError):
    """Something is wrong."""


class Point(NamedTuple):
    """A place.

    Attributes:
        x, y: where it is. Default: 0.
    """

    x: int = 0
    y: int = 0

    @property
    def size(self) -> int:
        """How far it is."""
        return self.x + self.y


@dataclass
class Line:
    """Some places.

    Attributes:
        points: where it goes. Default: no points.
        name: what it is called. Default: ``"line"``.

    Example:
        >>> Line().length()
        0
    """

    points: list[Point] = field(default_factory=list)
    name: str = "line"
    _kept: int = 0

    def length(self) -> int:
        """The number of points."""
        return len(self.points)


class Base:
    """What has a scale.

    Args:
        scale: a factor. Default: 1e-3, a thousandth.
        others: (B, L): anything else. Default: None, nothing.

    Example:
        >>> Base().scaled(1000)
        1.0
    """

    def __init__(self, scale: float = 1e-3, others: list[int] | None = None) -> None:
        self.scale = scale

    def scaled(self, number: float, twice: bool = False) -> float:
        """The number, scaled.

        Args:
            number: any.
            twice: scale it again. Default: False.
        """
        return self.scale * number


class Derived(Base):
    """Another one.

    Example:
        >>> Derived().scale
        0.001
    """

    def scaled(self, number: float, twice: bool = False) -> float:
        return number


def count(first: int, *rest: int, step: int = 1, last: int = 9, **options: int) -> int:
    """How many there are.

    Args:
        first, rest: numbers.
        step: leave some out. Default: 1.
        last, **options: as in :func:`other`, with the same default.

    Returns:
        A number.

    Example:
        >>> count(1)
        1
    """
    return 1


def everything() -> list[int]:
    """The numbers that there are.

    Example:
        >>> everything()
        []
    """
    return []
'''

#: What is taken away from the module above, and what is then missing.
TAKEN = {
    "#: One half.\n": "HALF: no comment '#: ...' at its definition",
    "  #: some numbers": "Numbers: no comment '#: ...' at its definition",
    "Something is wrong.": "Problem: no docstring",
    "x, y: where it is. Default: 0.": "Point: 'x' is not named under Attributes:",
    "How far it is.": "Point: size: no docstring",
    " Default: no points.": "Line: the default of 'points' is not stated",
    '``"line"``': "Line: the default of 'name' is not stated",
    "        >>> Line().length()\n": "Line: no example (>>>)",
    "The number of points.": "Line: length: no docstring",
    "scale: a factor. ": "Base: 'scale' is not named under Args: or Attributes:",
    " Default: 1e-3, a thousandth.": "Base: the default of 'scale' is not stated",
    "1e-3, a thousandth.": "Base: the default of 'scale' is not stated",
    "        >>> Base().scaled(1000)\n": "Base: no example (>>>)",
    "            number: any.\n": "Base: scaled: 'number' is not named under Args:",
    "Default: False": "Base: scaled: the default of 'twice' is not stated",
    "        >>> Derived().scale\n": "Derived: no example (>>>)",
    "\n\n    Args:\n        first": "count: no summary line, followed by a blank one",
    ", rest": "count: 'rest' is not named under Args:",
    "Default: 1.": "count: the default of 'step' is not stated",
    ", with the same default": "count: the default of 'last' is not stated",
    "    Returns:\n        A number.\n": "count: no Returns: or Yields:",
    "        >>> count(1)\n": "count: no example (>>>)",
    "The numbers that": "everything: no Returns: or Yields:",
}
#: What takes its place, where that is not nothing.
INSTEAD = {"\n\n    Args:\n        first": "\n    Args:\n        first"}

NAMES = ("HALF", "Numbers", "Problem", "Point", "Line", "Base", "Derived", "count", "everything")


@pytest.fixture(scope="module")
def tool() -> Any:
    return imported("check_docstrings", TOOL)


@pytest.fixture
def missing(tool: Any, tmp_path: Path) -> Iterator[Any]:
    """What is missing in a module of this text, by the tool."""

    def missing(text: str) -> list[str]:
        path = tmp_path / "made_up.py"
        path.write_text(text, encoding="utf-8")
        module = imported("made_up", path)
        return [line.removeprefix("made_up.") for line in tool.check([module, module])]

    yield missing
    sys.modules.pop("made_up", None)


def imported(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inherited docstrings are looked up there
    spec.loader.exec_module(module)
    return module


def test_nothing_is_missing(missing: Any) -> None:
    assert missing(f"{COMPLETE}\n__all__ = {NAMES}\n") == []


@pytest.mark.parametrize("taken", TAKEN)
def test_each_gap_is_found(missing: Any, taken: str) -> None:
    assert COMPLETE.count(taken) == 1
    text = COMPLETE.replace(taken, INSTEAD.get(taken, ""))
    assert missing(f"{text}\n__all__ = {NAMES}\n")[0] == TAKEN[taken]


def test_without_all_what_the_module_defines_is_public(missing: Any) -> None:
    text = "from pathlib import Path\ndef f() -> None: ...\ndef _g() -> None: ...\n"
    assert missing(text) == ["f: no docstring", "f: no example (>>>)"]  # once, though given twice


@pytest.mark.processes
def test_the_package_is_documented() -> None:
    result = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
