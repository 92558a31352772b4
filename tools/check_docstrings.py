"""Check that everything public is documented, with an example.

Usage: python tools/check_docstrings.py [PACKAGE ...], where a PACKAGE is a name such as metrics;
all of them by default.

Of each name in a package's ``__all__`` (of a module without one: of each public name it defines):

- a class or function has a docstring: a summary line, then a blank line or nothing;
- a section ``Args:`` or ``Attributes:`` names every parameter, in the docstring of the class, of
  its ``__init__`` or of a class it inherits from; a dataclass or NamedTuple has ``Attributes:``;
- where a parameter has a default, its entry says ``Default: ...``, or "the same default(s)" if it
  refers to another place; numbers, booleans and texts must be the real ones;
- a function that returns something has ``Returns:`` or ``Yields:``; one without arguments may say
  it in its summary, beginning with "The";
- a class or function has an example (``>>>``), except (rule 1) an exception and (rule 2) a record,
  that is a dataclass or NamedTuple without public methods;
- a public method has a docstring, its own or an inherited one; an ``Args:`` section in it names
  every parameter and default, too;
- a constant or type alias has a ``#:`` comment, and a module a docstring.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, get_origin

PACKAGE = "captum_ssm"
SUBPACKAGES = (
    "operators", "mixers", "tracing", "linear", "attr", "metrics", "viz", "models", "insights",
    "bench", "bench.tasks", "bench.data", "errors", "",
)  # fmt: skip

NO_DEFAULT = inspect.Parameter.empty
METHODS = (FunctionType, classmethod, staticmethod)


class Parameter(NamedTuple):
    name: str
    default: Any


def check(modules: Iterable[ModuleType]) -> list[str]:
    """One line for each thing that the documentation of the modules lacks."""
    seen, found = set(), []
    for module in modules:
        for name in public_names(module):
            value = getattr(module, name)
            if (name, id(value)) in seen:  # offered by another module, too
                continue
            seen.add((name, id(value)))
            found += [f"{module.__name__}.{name}: {gap}" for gap in gaps(module, name, value)]
    return found


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def gaps(module: ModuleType, name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) and get_origin(value) is None:
        yield from class_gaps(value)
    elif callable(value) and inspect.isfunction(inspect.unwrap(value)):
        yield from function_gaps(value)
    elif inspect.ismodule(value):
        yield from summary_gaps(inspect.getdoc(value) or "")
    elif not has_comment(module, name):
        yield "no comment '#: ...' at its definition"


def class_gaps(cls: type) -> Iterator[str]:
    doc, members = own_docs(cls), dict(public_members(cls))
    yield from summary_gaps(doc)
    if not issubclass(cls, BaseException):
        record = is_own_dataclass(cls) or hasattr(cls, "_fields")
        sections = ("Attributes",) if record else ("Args", "Attributes")
        yield from parameter_gaps(parameters_of(cls), map(own_docs, cls.__mro__), sections)
        acts = any(isinstance(member, METHODS) for member in members.values())
        if ">>>" not in doc and (acts or not record):
            yield "no example (>>>)"
    for name, member in members.items():
        for gap in method_gaps(cls, name, member):
            yield f"{name}: {gap}"


def function_gaps(function: Callable[..., Any]) -> Iterator[str]:
    doc, signature = inspect.getdoc(function) or "", inspect.signature(function)
    parameters = public(signature.parameters.values())
    yield from summary_gaps(doc)
    yield from parameter_gaps(parameters, [doc], ["Args"])
    returns = signature.return_annotation not in ("None", None, "NoReturn", signature.empty)
    said = {"Returns", "Yields"} & sections_of(doc).keys()
    if returns and not said and (parameters or not doc.startswith("The ")):
        yield "no Returns: or Yields:"
    if ">>>" not in doc:
        yield "no example (>>>)"


def method_gaps(cls: type, name: str, member: Any) -> Iterator[str]:
    doc = inspect.getdoc(getattr(cls, name)) or ""
    yield from summary_gaps(doc)
    if isinstance(member, METHODS) and member.__doc__ and "Args" in sections_of(doc):
        parameters = list(inspect.signature(getattr(cls, name)).parameters.values())
        own = 1 if isinstance(member, FunctionType) else 0  # self
        yield from parameter_gaps(public(parameters[own:]), [doc], ["Args"])


def summary_gaps(doc: str) -> Iterator[str]:
    lines = doc.splitlines()
    if not lines or not lines[0]:
        yield "no docstring"
    elif len(lines) > 1 and lines[1]:
        yield "no summary line, followed by a blank one"


def parameter_gaps(
    parameters: Iterable[Parameter], docs: Iterable[str], sections: Iterable[str]
) -> Iterator[str]:
    said: dict[str, str] = {}
    for doc in reversed(list(docs)):  # what a class says goes before what its bases say
        for section in sections:
            said |= entries(sections_of(doc).get(section, ""))
    where = " or ".join(f"{section}:" for section in sections)
    for name, default in parameters:
        if name not in said:
            yield f"{name!r} is not named under {where}"
        elif default is not NO_DEFAULT and not stated(default, said[name]):
            yield f"the default of {name!r} is not stated"


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, the inherited ones of the same package included."""
    package = cls.__module__.partition(".")[0]
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != package:
            continue
        for name, member in vars(base).items():
            wanted = isinstance(member, (*METHODS, property, cached_property))
            if wanted and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def own_docs(cls: type) -> str:
    """The docstrings of the class and of its ``__init__``, without those that Python makes."""
    start = vars(cls).get("__init__")
    made = (cls.__doc__ or "").startswith(f"{cls.__name__}(")
    docs = ["" if made else cls.__doc__, start.__doc__ if inspect.isfunction(start) else ""]
    return "\n\n".join(inspect.cleandoc(doc) for doc in docs if doc)


def is_own_dataclass(cls: type) -> bool:
    """Whether the class is a dataclass itself, not merely derived from one."""
    return "__dataclass_fields__" in vars(cls)


def parameters_of(cls: type) -> list[Parameter]:
    if getattr(cls, "_is_protocol", False) or issubclass(cls, Enum):
        return []
    if not is_own_dataclass(cls):
        return public(inspect.signature(cls).parameters.values())
    missing, found = dataclasses.MISSING, []
    for field in dataclasses.fields(cls):
        made = field.default_factory if field.default is missing else field.default
        if field.init and not field.name.startswith("_"):
            found.append(Parameter(field.name, NO_DEFAULT if made is missing else made))
    return found


def public(parameters: Iterable[inspect.Parameter]) -> list[Parameter]:
    return [Parameter(p.name, p.default) for p in parameters if not p.name.startswith("_")]


def sections_of(doc: str) -> dict[str, str]:
    """The indented text below each line such as ``Args:``."""
    sections: dict[str, str] = {}
    current = ""
    for line in doc.splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            current = heading[1]
            sections.setdefault(current, "")
        elif line and not line[0].isspace():
            current = ""
        elif current:
            sections[current] += f"{line}\n"
    return sections


def entries(section: str) -> dict[str, str]:
    """What a section says of each name; several names may share an entry."""
    found: dict[str, str] = {}
    for entry in re.split(r"^(?=\S)", dedent(section), flags=re.MULTILINE):
        names, colon, text = entry.partition(":")
        if colon:
            found |= dict.fromkeys(re.findall(r"\w+", re.sub(r"\(.*?\)", "", names)), text)
    return found


def stated(default: Any, text: str) -> bool:
    """Whether the entry of a parameter states its default."""
    text = " ".join(text.split())
    if re.search(r"\bsame defaults?\b", text):
        return True
    _, colon, said = text.partition("Default:")
    if not colon:
        return False
    if isinstance(default, (bool, str)):
        return str(default) in said
    if isinstance(default, (int, float)):
        numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", said.replace("_", ""))
        return str(default) in said or any(float(number) == default for number in numbers)
    return True


def has_comment(module: ModuleType, name: str) -> bool:
    """Whether ``#:`` stands above or beside the definition of a constant."""
    folder = getattr(module, "__path__", None)
    for path in Path(folder[0]).rglob("*.py") if folder else [Path(str(module.__file__))]:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if not re.match(rf"{name}\b[^=]*=", line):
                continue
            above = number
            while above and lines[above - 1].startswith("#"):
                above -= 1
            if any("#:" in text for text in lines[above : number + 1]):
                return True
    return False


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    asked = [name.removeprefix(PACKAGE).strip(".") for name in sys.argv[1:]] or SUBPACKAGES
    found = check(importlib.import_module(f"{PACKAGE}.{name}".rstrip(".")) for name in asked)
    for line in found:
        print(line)
    print(f"docstrings: {len(found)} gaps")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
