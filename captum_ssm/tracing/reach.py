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
    visited_ids: set[int] = set()
    references = [("forward_func", value)]
    for _ in range(_STEPS + 1):  # breadth first, so that names are short
        unvisited = [(name, x) for name, x in references if id(x) not in visited_ids]
        visited_ids.update(id(x) for _, x in unvisited)
        yield from ((name, x) for name, x in unvisited if isinstance(x, nn.Module))
        references = [inner for name, x in unvisited for inner in _references_of(name, x)]


def _references_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each direct reference of ``value``."""
    if isinstance(value, FunctionType):
        yield from _references_of_function(value)
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
        yield from _references_of_object(name, value)


def _references_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield a function's closure, the globals that it reads, and its default arguments."""
    code = function.__code__
    names_read = _names_read(code)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield from _value_or_attributes(names_read, name, cell.cell_contents)
        except ValueError:  # the variable is not assigned yet
            continue
    for name in sorted(names_read & function.__globals__.keys()):
        yield from _value_or_attributes(names_read, name, function.__globals__[name])
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()  # of the last arguments
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names_read(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in the code of a function and its functions."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names, *(name for inner_code in inner for name in _names_read(inner_code))}


def _value_or_attributes(names_read: set[str], name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value that a function refers to, or only the attributes that its code reads."""
    attributes = {} if isinstance(value, _NOT_OPENED) else getattr(value, "__dict__", {})
    attributes_read = [name_read for name_read in attributes if name_read in names_read]
    if attributes_read and not any(hasattr(type(value), name_read) for name_read in names_read):
        yield from ((f"{name}.{name_read}", attributes[name_read]) for name_read in attributes_read)
    else:  # the code may call a method, which may read any attribute
        yield name, value


def _references_of_object(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's modules and other callables, and its own ``__call__``."""
    if callable(value):
        yield f"{name}.__call__", type(value).__call__
    for key, attribute in list(vars(value).items()):
        if callable(attribute):
            yield f"{name}.{key}", attribute
