"""The modules that a function or an object refers to, of which it may run one."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

#: How many steps from the function are followed: a wrapper around a wrapper of a closure.
_STEPS = 5
#: What is no object that holds a model: its attributes are not looked through.
_NOT_OPENED = (type, ModuleType, Tensor, nn.Module)
#: What reads a name of the module in which a function was written.
_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
#: What reads an attribute of the value that was read last.
_READS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
#: What has the name of a value without using it.
_READS_NOTHING = (*_READS_ATTRIBUTE, "LOAD_CLOSURE", "LOAD_CONST")


def reachable(value: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can be reached, each with the name by which it is.

    Of a function these are its closure's, those of global names that it reads and of its default
    arguments; of an object those that it holds; and what those in turn refer to.

    Args:
        value: a function, a partial, a bound method or any object.
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
    elif not isinstance(value, _NOT_OPENED) and hasattr(value, "__dict__"):
        yield from _of_object(name, value)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield from _used(code, name, cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    for name in dict.fromkeys(_global_names(code)):
        if name in function.__globals__:
            yield from _used(code, name, function.__globals__[name])
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _used(code: CodeType, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What code uses of a value that it knows by a name: some of its attributes, or all of it."""
    opened = hasattr(value, "__dict__") and not isinstance(value, _NOT_OPENED)
    read = dict.fromkeys(_attributes(code, name)) if opened else {}
    if read and read.keys() <= vars(value).keys():
        yield from ((f"{name}.{attribute}", vars(value)[attribute]) for attribute in read)
    else:
        yield name, value


def _attributes(code: CodeType, name: str) -> Iterator[str | None]:
    """The attributes that are read of a name, and None where it is used in another way."""
    for here, after in pairwise(dis.get_instructions(code)):
        loads = here.opname.startswith("LOAD_") and here.opname not in _READS_NOTHING
        if loads and here.argval == name:
            yield after.argval if after.opname in _READS_ATTRIBUTE else None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes(constant, name)


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
