"""The modules that a function or an object refers to, of which it may run one."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

#: How many steps from the function are followed: a wrapper around a wrapper of a closure.
_STEPS = 5
#: What is no object that holds a model: its attributes are not looked through.
_NOT_OPENED = (type, ModuleType, Tensor, nn.Module)
#: What reads a name of the module in which a function was written.
_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")


def reachable(value: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can be reached, each with the name by which it is.

    Of a function these are its closure's, those of global names that it reads and of its default
    arguments; of an object those that it holds; and what those in turn refer to.

    Args:
        value: a function, a partial, a bound method or any object.

    Yields:
        Name and module, the nearest first.
    """
    seen: set[int] = set()
    near = [("forward_func", value)]
    for _ in range(_STEPS + 1):
        fresh = [(name, x) for name, x in near if id(x) not in seen]
        seen.update(id(x) for _, x in fresh)
        yield from ((name, x) for name, x in fresh if isinstance(x, nn.Module))
        near = [inner for name, x in fresh for inner in _referred(name, x)]


def _referred(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a value refers to, by name."""
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield name, value.__func__
        yield name, value.__self__
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name}[{i}]", x) for i, x in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{i}]", x) for i, x in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", x) for key, x in value.items())
    elif not isinstance(value, type | ModuleType | Tensor | nn.Module) and hasattr(
        value, "__dict__"
    ):
        yield from _of_object(name, value)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in dict.fromkeys(_global_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: CodeType) -> Iterator[str]:
    """The global names that a function's code reads, functions written inside of it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS_GLOBAL:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _of_object(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The modules and whatever else can be called that an object holds; its own ``__call__``.

    Other things that it holds are not gone through: they are its settings and records.
    """
    if callable(value):
        yield f"{name}.__call__", type(value).__call__
    for key, held in list(vars(value).items()):
        if callable(held):
            yield f"{name}.{key}", held
