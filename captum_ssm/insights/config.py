"""Types of method arguments on the page, such as numbers; each type checks and converts values.

The names are the same as in ``captum.insights.attr_vis.config``, so scripts that add a method to
the tables still work. :class:`BaselinesConfig`, :class:`BoolConfig`, :class:`ContrastConfig` and
:class:`TupleConfig` are new. The attribute ``type`` names the type for the page. In ``parse``,
``name`` is the argument's name, for errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import OptionError


class NumberConfig(NamedTuple):
    """The type of a numeric argument: an integer, unless ``value`` or ``limit`` contains a float.

    Attributes:
        value: the argument's default. Default: 1.
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
        """Return the value as an int or a float; raise if it is not a number within the limits."""
        if not _is_number(value) or (self.whole and value != int(value)):
            raise OptionError(f"{name}={value!r}: use a{' whole' if self.whole else ''} number.")
        low, high = self.limit
        if (low is not None and value < low) or (high is not None and value > high):
            raise OptionError(f"{name}={value!r}: use a number {_between(low, high)}.")
        return int(value) if self.whole else float(value)


class StrEnumConfig(NamedTuple):
    """The type of an argument with a list of accepted words.

    Attributes:
        value: the argument's default.
        limit: the accepted words; also None, if the argument may be left out.
    """

    value: str | None
    limit: Sequence[str | None]
    type: str = "enum"

    def parse(self, name: str, value: Any) -> str | None:
        """Return the value unchanged; raise if it is not one of the accepted words."""
        if value not in self.limit:
            raise OptionError(f"{name}={value!r}: use one of {list(self.limit)}.")
        word: str | None = value
        return word


class BaselinesConfig(NamedTuple):
    """The type of the argument ``baselines`` of this package's methods.

    Attributes:
        value: the argument's default. Default: None, the default of the method's rule.
        limit: the values that the page offers. Default: None, ``"mean"`` and ``"0"``.
    """

    value: str | None = None
    limit: Sequence[str | None] = (None, "mean", "0")
    type: str = "enum"

    def parse(self, name: str, value: Any) -> Any:
        """Return 0.0 for ``"0"``, and any other value unchanged; the method checks the value."""
        return 0.0 if isinstance(value, str) and value == "0" else value


class ContrastConfig(NamedTuple):
    """The type of the argument ``contrast``: the name of a contrast, or of a second class.

    Attributes:
        value: the argument's default. Default: None, no contrast.
        limit: the names of contrasts, and None. A class of the same name cannot be selected.
            Default: only None.
    """

    value: str | None = None
    limit: Sequence[str | None] = (None,)
    type: str = "contrast"

    def parse(self, name: str, value: Any) -> Any:
        """Return None for an empty text, and any other value unchanged."""
        return None if isinstance(value, str) and value == "" else value


class StrConfig(NamedTuple):
    """The type of a text argument.

    Attributes:
        value: the argument's default.
    """

    value: str
    type: str = "string"

    def parse(self, name: str, value: Any) -> Any:
        """Return the value unchanged; the method checks the value."""
        return value


class BoolConfig(NamedTuple):
    """The type of a boolean argument.

    Attributes:
        value: the argument's default. Default: False.
    """

    value: bool = False
    type: str = "boolean"

    def parse(self, name: str, value: Any) -> bool:
        """Return the value unchanged; raise if it is not a boolean."""
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: use true or false.")
        return value


class TupleConfig(NamedTuple):
    """The type of an argument of several integers, which can be written as text: ``"3, 5, 5"``.

    Attributes:
        value: the argument's default. Default: None, the method's default.
    """

    value: tuple[int, ...] | None = None
    type: str = "tuple"

    def parse(self, name: str, value: Any) -> Any:
        """Return a tuple of integers, None for an empty value, or a tuple of tuples unchanged."""
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
    """The arguments of a method that the page displays.

    Attributes:
        params: the type of each argument, by name.
        help_info: a line about the method. Default: None.
        post_process: functions that convert values for the method, by name of the argument.
            Default: None, no functions.
    """

    params: Mapping[str, Config]
    help_info: str | None = None
    post_process: Mapping[str, Callable[[Any], Any]] | None = None

    def parse(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check and convert arguments, and add the defaults of missing arguments."""
        post_process = self.post_process or {}
        values = dict(arguments)
        for name, kind in self.params.items():
            value = kind.parse(name, arguments.get(name, kind.value))
            values[name] = post_process[name](value) if name in post_process else value
        return values


def described(parameters: ConfigParameters) -> dict[str, dict[str, Any]]:
    """Return for each argument a dict of its type's attributes, which the page displays."""
    descriptions = {}
    for name, kind in parameters.params.items():
        descriptions[name] = kind._asdict()
        if isinstance(kind, NumberConfig):
            descriptions[name]["whole"] = kind.whole
    return descriptions


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _between(low: float | None, high: float | None) -> str:
    if low is None:
        return f"of at most {high}"
    return f"of at least {low}" if high is None else f"from {low} to {high}"
