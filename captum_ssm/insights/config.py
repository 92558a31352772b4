"""Kinds of arguments of a method: each has a default, a description, and reads a value.

The names are the same as in ``captum.insights.attr_vis.config``, so scripts that add a method to
the tables still work. :class:`BaselinesConfig`, :class:`BoolConfig`, :class:`ContrastConfig` and
:class:`TupleConfig` are new.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import OptionError


class NumberConfig(NamedTuple):
    """A number; a whole one, unless the default or a limit is written with a decimal point.

    Attributes:
        value: the default. Default: 1.
        limit: the smallest and the largest value; None for no limit. Default: no limits.
    """

    value: float = 1
    limit: tuple[float | None, float | None] = (None, None)
    type: str = "number"

    @property
    def whole(self) -> bool:
        """Return True if the value must be an integer."""
        return not any(isinstance(number, float) for number in (self.value, *self.limit))

    def parse(self, name: str, value: Any) -> float:
        """Return the value, an int or a float as the argument wants it."""
        if not _is_number(value) or (self.whole and value != int(value)):
            raise OptionError(f"{name}={value!r}: use a{' whole' if self.whole else ''} number.")
        low, high = self.limit
        if (low is not None and value < low) or (high is not None and value > high):
            raise OptionError(f"{name}={value!r}: use a number {_between(low, high)}.")
        return int(value) if self.whole else float(value)


class StrEnumConfig(NamedTuple):
    """One of several words.

    Attributes:
        value: the default.
        limit: the words; None, where the argument may be left out, is one of them.
    """

    value: str | None
    limit: Sequence[str | None]
    type: str = "enum"

    def parse(self, name: str, value: Any) -> str | None:
        """Return the word; raise if it is not one of the accepted words."""
        if value not in self.limit:
            raise OptionError(f"{name}={value!r}: use one of {list(self.limit)}.")
        chosen: str | None = value
        return chosen


class BaselinesConfig(NamedTuple):
    """The baselines of a method of this package.

    Attributes:
        value: the default. Default: None, the default of the method's rule.
        limit: the words that the page offers. Default: None, the mean, and zero.
    """

    value: str | None = None
    limit: Sequence[str | None] = (None, "mean", "0")
    type: str = "enum"

    def parse(self, name: str, value: Any) -> Any:
        """Return zero for its word, else the word; the method checks a script's value."""
        return 0.0 if isinstance(value, str) and value == "0" else value


class ContrastConfig(NamedTuple):
    """The contrast of a class: a contrast's name, or another class by its name.

    Attributes:
        value: the default. Default: None, nothing.
        limit: the words, and None; a class with the name of one cannot be named. Default: None
            alone.
    """

    value: str | None = None
    limit: Sequence[str | None] = (None,)
    type: str = "contrast"

    def parse(self, name: str, value: Any) -> Any:
        """Return the word or the class's name; an empty text is None."""
        return None if isinstance(value, str) and value == "" else value


class StrConfig(NamedTuple):
    """Any text.

    Attributes:
        value: the default.
    """

    value: str
    type: str = "string"

    def parse(self, name: str, value: Any) -> Any:
        """Return the text; the method checks other values."""
        return value


class BoolConfig(NamedTuple):
    """Yes or no.

    Attributes:
        value: the default. Default: False.
    """

    value: bool = False
    type: str = "boolean"

    def parse(self, name: str, value: Any) -> bool:
        """Return the value."""
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: use true or false.")
        return value


class TupleConfig(NamedTuple):
    """Whole numbers in a row, which may also be written as text: ``"3, 5, 5"``.

    Attributes:
        value: the default. Default: None, the argument is left to the method.
    """

    value: tuple[int, ...] | None = None
    type: str = "tuple"

    def parse(self, name: str, value: Any) -> Any:
        """Return the numbers, or None for none; tuples of tuples pass as they are."""
        if isinstance(value, str):
            words = [word for word in re.split(r"[\s,()\[\]]+", value) if word]
            value = [int(w) if re.fullmatch(r"[+-]?\d{1,9}", w) else w for w in words]
        if isinstance(value, int) and not isinstance(value, bool):
            value = (value,)
        if value is None or (isinstance(value, Sequence) and not value):
            return None
        if isinstance(value, tuple) and all(isinstance(inner, tuple) for inner in value):
            return value
        if not isinstance(value, Sequence) or not all(type(number) is int for number in value):
            raise OptionError(f"{name}={value!r}: use whole numbers, such as '3, 5, 5'.")
        return tuple(value)


Config = (
    NumberConfig
    | StrEnumConfig
    | BaselinesConfig
    | ContrastConfig
    | StrConfig
    | BoolConfig
    | TupleConfig
)


class ConfigParameters(NamedTuple):
    """The arguments of a method that the page offers.

    Attributes:
        params: their kinds, by name.
        help_info: a line about the method. Default: None.
        post_process: by name, a function that converts a value for the method. Default: None, none.
    """

    params: Mapping[str, Config]
    help_info: str | None = None
    post_process: Mapping[str, Callable[[Any], Any]] | None = None

    def parse(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the method's arguments: values of known kinds are read and checked.

        A missing value has its default; None means the method's own default.
        """
        final = self.post_process or {}
        read = dict(given)
        for name, kind in self.params.items():
            value = kind.parse(name, given.get(name, kind.value))
            read[name] = final[name](value) if name in final else value
        return read


def described(parameters: ConfigParameters) -> dict[str, dict[str, Any]]:
    """Return the arguments in the page's form."""
    found = {}
    for name, kind in parameters.params.items():
        found[name] = kind._asdict()
        if isinstance(kind, NumberConfig):
            found[name]["whole"] = kind.whole
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _between(low: float | None, high: float | None) -> str:
    if low is None:
        return f"of at most {high}"
    return f"of at least {low}" if high is None else f"from {low} to {high}"
