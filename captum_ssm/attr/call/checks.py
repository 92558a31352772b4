"""Checks of options. Each function checks one type of option, and returns the option's value.

:func:`flags` and :func:`no_repeats` check several values, and return nothing. NumPy and torch
integers are accepted. A bool is not accepted as an integer, nor an integer as a bool.
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
_AMERICAN = {"centred": "centered"}

Function = TypeVar("Function", bound=Callable[..., Any])

#: ``s6``: only the scan (hidden-attention paper, eq. 14).  ``unified``: also convolution,
#: activation, gate and norm (unified paper, eqs. 9, 11, 17, 21).  ``exact``: also the skip, so that
#: the matrices times the values, plus the bias, are the mixer's output.
PRESETS: dict[str, frozenset[str]] = {
    "s6": frozenset({"scan"}),
    "unified": COMPONENTS - {"skip"},
    "exact": COMPONENTS,
}


def flags(**options: Any) -> None:
    """Raise unless all options are True or False."""
    for name, value in options.items():
        if not isinstance(value, bool | np.bool_):
            raise OptionError(f"{name}={value!r} is not a bool. Pass True or False.")


def integer(name: str, value: Any, example: int = 0) -> int:
    """Check that an option is an integer, and return it as an int; errors suggest ``example``."""
    number = as_integer(value)
    if number is None:
        raise OptionError(f"{name}={value!r} is not an integer. Pass one such as {example}.")
    return number


def count(name: str, value: Any) -> int | None:
    """Check that an option is a positive integer or None, and return it."""
    if value is None:
        return None
    number = integer(name, value, example=1)
    if number < 1:
        raise OptionError(f"{name}={number} is below 1. Pass an integer of at least 1, or None.")
    return number


def integers(name: str, value: Any, noun: str) -> tuple[int, ...]:
    """Check a list, tuple, range, tensor or array (n,) of integers, and return it as a tuple.

    Args:
        name, value: the option's name and value.
        noun: a noun for the integers in the error message, such as ``"heads"``.
    """
    entries = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        suggested = f"[{entries}]" if as_integer(entries) is not None else "[0, 1]"
        raise OptionError(
            f"{name}={value!r} is not a list. Pass a list of {noun}, such as {name}={suggested}."
        )
    items = list(entries)  # ``entries`` may be an iterator, and is needed twice
    numbers = [as_integer(entry) for entry in items]
    for entry, number in zip(items, numbers, strict=True):
        if number is None:
            raise OptionError(f"{name} contains {entry!r}. Pass integers, such as {name}=[0, 1].")
    return tuple(number for number in numbers if number is not None)


def no_repeats(name: str, numbers: Iterable[int]) -> None:
    """Raise if the option ``name`` contains an integer twice."""
    earlier = set[int]()
    for number in numbers:
        if number in earlier:
            raise OptionError(f"{name} contains {number} twice. Pass each number once.")
        earlier.add(number)


def tolerance(name: str, value: Any) -> bool | float:
    """Check that an option such as ``verify`` is a bool or a tolerance, and return it."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    number = as_number(value)
    if number is None or not 0 < number < 1:
        raise OptionError(
            f"{name}={value!r} is not accepted. Pass True, False, or a tolerance above 0 and below "
            f"1, such as {name}=1e-2."
        )
    return number


def ratio(name: str, value: Any) -> float:
    """Check that an option is a number of at least 0 and below 1, and return it."""
    number = as_number(value)
    if number is None or not 0 <= number < 1:
        raise OptionError(f"{name}={value!r} is not accepted. Pass a number x, 0 <= x < 1.")
    return number


def choice(name: str, value: Any, accepted: Collection[Any]) -> Any:
    """Check that an option is an ``accepted`` name or integer; return it, in American spelling."""
    normalized = as_integer(value) if not isinstance(value, str) else _AMERICAN.get(value, value)
    if normalized is None or normalized not in accepted:
        raise OptionError(
            f"{name}={value!r} is not known. Pass one of {', '.join(map(repr, accepted))}."
        )
    return normalized


def parse_components(components: str | Collection[str]) -> frozenset[str]:
    """Return the option ``components`` as a set of component names.

    Args:
        components: ``"s6"``, ``"unified"`` or ``"exact"``; one of these minus some components,
            such as ``"exact-gate-skip"``; or a collection of component names.
    """
    if isinstance(components, str):
        preset, *removed = components.split("-")
        if preset not in PRESETS or not COMPONENTS.issuperset(removed):
            raise OptionError(
                f"components={components!r} is not known. Pass {', '.join(map(repr, PRESETS))}, "
                "one of these minus some components ('unified-conv'), or a set of names from "
                f"{sorted(COMPONENTS)}."
            )
        names = PRESETS[preset] - set(removed)
    else:
        is_collection = isinstance(components, Collection) and not isinstance(components, Tensor)
        are_strings = is_collection and all(isinstance(part, str) for part in components)
        names = frozenset(components) if are_strings else frozenset()
    if not names or not names <= COMPONENTS:
        raise OptionError(
            f"components={components!r} is not accepted. Pass at least one component, and only "
            f"names from {sorted(COMPONENTS)}."
        )
    return names


def reduction(reduce: Any) -> Reduce:
    """Check the option ``reduce``; wrap a custom function so that its results are checked."""
    check_reduce(reduce)
    if reduce is None or isinstance(reduce, str):
        return reduce

    def checked(values: Tensor) -> Tensor:
        """Call ``reduce`` on values (..., n); raise unless it returns a floating tensor (...)."""
        try:
            out = reduce(values)
        except Exception as error:
            out_of_memory = isinstance(error, RuntimeError) and ran_out_of_memory(error)
            if out_of_memory or isinstance(error, MemoryError):
                raise  # the caller retries with fewer values
            raise _reduction_error(reduce, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(out, Tensor):
            raise _reduction_error(reduce, f"returned {type(out).__name__}, not a tensor")
        if out.shape != values.shape[:-1] or not out.is_floating_point():
            raise _reduction_error(
                reduce,
                f"returned {out.dtype} of shape {tuple(out.shape)} for {values.dtype} of shape "
                f"{tuple(values.shape)}",
            )
        return out

    return checked


def _reduction_error(reduce: Any, problem: str) -> OptionError:
    """Return the error for a custom ``reduce`` function that failed with a ``problem``."""
    return OptionError(
        f"reduce={reduce!r} {problem}. Pass a function that reduces the last dimension, such as "
        "reduce=lambda channels: channels.mean(-1)."
    )


def as_integer(value: Any) -> int | None:
    """Convert an integer of Python, NumPy or torch to an int; return None for other values."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        return None
    try:  # item() converts a bool of NumPy or torch to a Python bool
        plain: Any = value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
        return None if isinstance(plain, bool) else operator.index(plain)
    except (TypeError, ValueError, RuntimeError):
        return None


def as_number(value: Any) -> float | None:
    """Convert a finite real number to a float; return None for a bool, NaN or other values."""
    is_scalar = isinstance(value, Tensor | np.ndarray | np.generic) and not value.ndim
    plain = value.item() if is_scalar else value
    if isinstance(plain, bool) or not isinstance(plain, Real):
        return None
    return float(plain) if math.isfinite(plain) else None


def in_place_of(function: Function) -> Callable[[Callable[..., Any]], Function]:
    """Return a decorator that copies the function's name, signature and docstring to a wrapper.

    The wrapper has no ``__wrapped__``, because Captum's tools would call that function instead.
    """

    def imitate(wrapper: Callable[..., Any]) -> Function:
        """Copy the function's name, docstring and signature to ``wrapper``."""
        functools.update_wrapper(wrapper, function)
        vars(wrapper)["__signature__"] = inspect.signature(function)
        del vars(wrapper)["__wrapped__"]
        return cast(Function, wrapper)

    return imitate
