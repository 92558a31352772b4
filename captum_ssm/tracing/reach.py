"""Find the modules that a function or an object refers to, and may therefore run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

#: Number of references followed from the function, enough for two wrappers around a closure.
_STEPS = 5
#: Types whose attributes are not searched.
_NOT_OPENED = (type, ModuleType, Tensor, nn.Module)


def reachable(value: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that ``value`` refers to, with names such as ``forward_func.model``.

    A function refers to its closure, its default arguments and the globals that it reads. An
    object refers to its attributes. References of references are followed as well.
    """
    seen: set[int] = set()
    near = [("forward_func", value)]
    for _ in range(_STEPS + 1):
        fresh = [(name, x) for name, x in near if id(x) not in seen]
        seen.update(id(x) for _, x in fresh)
        yield from ((name, x) for name, x in fresh if isinstance(x, nn.Module))
        near = [inner for name, x in fresh for inner in _referred(name, x)]


def _referred(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each direct reference of ``value``."""
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
    read = _names_read(code)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield from _used(read, name, cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    for name in sorted(read & function.__globals__.keys()):
        yield from _used(read, name, function.__globals__[name])
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names_read(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in the code of a function and its functions."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names, *(name for each in inner for name in _names_read(each))}


def _used(read: set[str], name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value that a function refers to, or only the attributes that its code reads."""
    held = {} if isinstance(value, _NOT_OPENED) else getattr(value, "__dict__", {})
    named = [each for each in held if each in read]
    if named and not any(hasattr(type(value), each) for each in read):
        yield from ((f"{name}.{each}", held[each]) for each in named)
    else:
        yield name, value


def _of_object(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's modules and other callables, and its own ``__call__``."""
    if callable(value):
        yield f"{name}.__call__", type(value).__call__
    for key, held in list(vars(value).items()):
        if callable(held):
            yield f"{name}.{key}", held
