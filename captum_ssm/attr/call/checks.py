"""Checks of options, one function for each kind, which returns the option as a Python value.

:func:`flags` and :func:`no_repeats` check several at once, and return nothing. Integers of numpy
and torch are accepted; a bool is not an integer, nor an integer a bool.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np
from torch import Tensor

from ...errors import OptionError
from ...operators import Reduce
from ...operators.base import COMPONENTS
from ...operators.kernels.portions import ran_out_of_memory
from ...operators.reduction import check_reduce

#: British spellings of values, which are accepted as well.
_SPELLED = {"centred": "centered"}

Function = TypeVar("Function", bound=Callable[..., Any])

#: ``s6``: the scan alone (hidden-attention paper, eq. 14).  ``unified``: with convolution,
#: activation, gate and norm (unified paper, eqs. 9, 11, 17, 21).  ``exact``: the skip as well, so
#: that the matrices times the values, plus the bias, are the mixer's output.
PRESETS: dict[str, frozenset[str]] = {
    "s6": frozenset({"scan"}),
    "unified": COMPONENTS - {"skip"},
    "exact": COMPONENTS,
}


def flags(**options: Any) -> None:
    """Raise unless all options are True or False."""
    for name, value in options.items():
        if not isinstance(value, bool | np.bool_):
            raise OptionError(f"{name}={value!r} must be True or False.")


def integer(name: str, value: Any, example: int = 0) -> int:
    """Read an option that is an integer; an error suggests ``example``."""
    found = as_integer(value)
    if found is None:
        raise OptionError(f"{name}={value!r} must be an integer, for example {name}={example}.")
    return found


def count(name: str, value: Any) -> int | None:
    """Read an option that is an integer from 1 on, or None."""
    if value is None:
        return None
    found = integer(name, value, example=1)
    if found < 1:
        raise OptionError(f"{name}={found} must be at least 1, or None for all.")
    return found


def integers(name: str, value: Any, meant: str) -> tuple[int, ...]:
    """Read an option that lists integers: a list, tuple, range, tensor (n,) or array (n,).

    Args:
        name, value: the option's name and value.
        meant: a word for the integers, such as ``"heads"``.
    """
    entries = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        suggested = f"[{entries}]" if as_integer(entries) is not None else "[0, 1]"
        raise OptionError(
            f"{name}={value!r} must be a list of {meant}, for example {name}={suggested}."
        )
    listed = list(entries)
    found = [as_integer(entry) for entry in listed]
    for entry, number in zip(listed, found, strict=True):
        if number is None:
            raise OptionError(f"{name} holds {entry!r}; {meant} are numbered by integers from 0.")
    return tuple(number for number in found if number is not None)


def no_repeats(name: str, numbers: Iterable[int]) -> None:
    """Raise if a number occurs twice."""
    seen = set[int]()
    for number in numbers:
        if number in seen:
            raise OptionError(f"{name} names {number} twice. Name each one once.")
        seen.add(number)


def tolerance(name: str, value: Any) -> bool | float:
    """Read an option such as ``verify``: True, False, or a tolerance."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    found = as_number(value)
    if found is None or not 0 < found < 1:
        raise OptionError(
            f"{name}={value!r} must be True, False, or a tolerance above 0 and below 1, for "
            f"example {name}=1e-2."
        )
    return found


def ratio(name: str, value: Any) -> float:
    """Read an option that is a number from 0 on and below 1."""
    found = as_number(value)
    if found is None or not 0 <= found < 1:
        raise OptionError(f"{name}={value!r} must be a number, at least 0 and below 1.")
    return found


def choice(name: str, value: Any, accepted: Collection[Any]) -> Any:
    """Read an option that is one of a few values, all names or all integers."""
    plain = as_integer(value) if not isinstance(value, str) else _SPELLED.get(value, value)
    if plain is None or plain not in accepted:
        raise OptionError(
            f"{name}={value!r} is not known. Use one of {', '.join(map(repr, accepted))}."
        )
    return plain


def parse_components(components: str | Collection[str]) -> frozenset[str]:
    """Read the option ``components`` as a set of names.

    Args:
        components: ``"s6"``, ``"unified"``, ``"exact"``; one of them without some parts, such as
            ``"exact-gate-skip"``; or any collection of component names.
    """
    if isinstance(components, str):
        preset, *removed = components.split("-")
        if preset not in PRESETS or not COMPONENTS.issuperset(removed):
            raise OptionError(
                f"components={components!r} is not known. Use {', '.join(map(repr, PRESETS))}, one "
                "of them without some parts ('unified-conv'), or a set of names out of "
                f"{sorted(COMPONENTS)}."
            )
        chosen = PRESETS[preset] - set(removed)
    else:
        listed = isinstance(components, Collection) and not isinstance(components, Tensor)
        names = listed and all(isinstance(part, str) for part in components)
        chosen = frozenset(components) if names else frozenset()
    if not chosen or not chosen <= COMPONENTS:
        raise OptionError(
            f"components={components!r} must leave at least one component, and name none but "
            f"{sorted(COMPONENTS)}."
        )
    return chosen


def reduction(reduce: Any) -> Reduce:
    """Read the option ``reduce``; wrap a custom function to check its results."""
    check_reduce(reduce)
    if reduce is None or isinstance(reduce, str):
        return reduce

    def checked(values: Tensor) -> Tensor:
        try:
            found = reduce(values)
        except Exception as error:
            out_of_memory = isinstance(error, RuntimeError) and ran_out_of_memory(error)
            if out_of_memory or isinstance(error, MemoryError):
                raise
            raise _no_reduction(reduce, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Tensor):
            raise _no_reduction(reduce, f"returned {type(found).__name__} in place of a tensor")
        if found.shape != values.shape[:-1] or not found.is_floating_point():
            raise _no_reduction(
                reduce,
                f"made {tuple(found.shape)} of {found.dtype} out of {tuple(values.shape)} of "
                f"{values.dtype}",
            )
        return found

    return checked


def _no_reduction(reduce: Any, what: str) -> OptionError:
    return OptionError(
        f"reduce={reduce!r} {what}. A function must reduce the last dimension, as in "
        "reduce=lambda channels: channels.mean(-1)."
    )


def as_integer(value: Any) -> int | None:
    """Return a value as an int; None for other values, such as a bool."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        return None
    try:
        plain: Any = value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
        return None if isinstance(plain, bool) else operator.index(plain)
    except (TypeError, ValueError, RuntimeError):
        return None


def as_number(value: Any) -> float | None:
    """Return a value as a finite float; None for other values, such as a bool or NaN."""
    one = isinstance(value, Tensor | np.ndarray | np.generic) and not value.ndim
    plain = value.item() if one else value
    if isinstance(plain, bool) or not isinstance(plain, Real):
        return None
    return float(plain) if math.isfinite(plain) else None


def in_place_of(function: Function) -> Callable[[Callable[..., Any]], Function]:
    """Return a decorator that gives a wrapper the function's name, signature and docstring.

    It has no ``__wrapped__``, through which Captum's tools would bypass it.
    """

    def passing(wrapper: Callable[..., Any]) -> Function:
        functools.update_wrapper(wrapper, function)
        vars(wrapper)["__signature__"] = inspect.signature(function)
        del vars(wrapper)["__wrapped__"]
        return cast(Function, wrapper)

    return passing
