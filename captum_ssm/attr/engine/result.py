"""Base of all results: save and load them exactly, and show them as HTML or in notebooks."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor

from ... import __version__
from ..._files import existing_file, make_folder, read_text, write_whole
from ..._optional import optional
from ...errors import DataError, InputError
from ..text.tokens import Tokens

if TYPE_CHECKING:
    from typing_extensions import Self

#: The version of the file format; increased when older package versions cannot read new files.
_FORM = 1
#: Floats without a JSON representation, which are saved as strings.
_NO_NUMBERS = ("nan", "inf", "-inf")
#: The module that draws pages, imported only on use: ``attr`` must not depend on ``viz``.
_PAGES = ".viz.html.results"

#: Names of tokens, for each example.
Names = tuple[Sequence[str], ...]
#: A dataclass whose instances are fields of results.
Part = TypeVar("Part", bound=type)

_PARTS: dict[str, type] = {}


def part(kind: Part) -> Part:
    """Register a dataclass as a field of results, so that ``save`` and ``load`` accept it."""
    _PARTS[kind.__name__] = kind
    return kind


part(Tokens)


class Result:
    """Base of results, with methods to save them and to show them in a notebook or browser.

    HTML pages include their script and load nothing from the network, so they work in Colab,
    VS Code and remote Jupyter.
    """

    _kinds: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls, kind: bool = True, **options: Any) -> None:
        """Register the class for :func:`load`, unless it is a base (``kind=False``)."""
        super().__init_subclass__(**options)
        if kind:
            Result._kinds[cls.__name__] = cls

    def save(self, path: str | Path) -> Path:
        """Save the result; :func:`captum_ssm.load` restores it exactly, on the CPU.

        Args:
            path: the file; an old file is replaced only after a complete write. Its folder is
                created.

        Returns:
            The path.

        Raises:
            WriteError: if the file cannot be written; an old file is then unchanged.
        """
        content = {
            "captum_ssm": __version__,
            "form": _FORM,
            "kind": type(self).__name__,
            "state": _encode(self._state()),
        }
        return _write(path, json.dumps(content, allow_nan=False) + "\n")

    @overload
    def to_html(self, path: None = None, title: str | None = None) -> str: ...

    @overload
    def to_html(self, path: str | Path, title: str | None = None) -> Path: ...

    def to_html(self, path: str | Path | None = None, title: str | None = None) -> str | Path:
        """Write the result as one self-contained HTML page, or return the page.

        Args:
            path: the file; an old file is replaced only after a complete write. Its folder is
                created. Default: None, return the page.
            title: the heading of the page. Default: None, the class name of the result.

        Returns:
            The path, or the HTML text.

        Raises:
            WriteError: if the file cannot be written; an old file is then unchanged.
        """
        page = self._page(title)
        return page if path is None else _write(path, page)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary of named values for each token, node or pair of tokens."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return :meth:`rows` as a ``pandas.DataFrame``."""
        return optional("pandas", "pandas", "to_pandas()").DataFrame(self.rows())

    def show(self) -> None:
        """Show the HTML page: in a notebook below the cell, elsewhere in a browser.

        For the browser the page is written to a temporary file, and its path is printed.
        """
        if _in_notebook():
            import_module("IPython.display").display(self)
            return
        with tempfile.NamedTemporaryFile("wb", suffix=".html", delete=False) as file:
            file.write(self._page(None).encode())
        print(f"wrote {file.name}")
        webbrowser.open(Path(file.name).as_uri())

    def _repr_html_(self) -> str:
        """Return the HTML page in an iframe, which separates its styles from the notebook's."""
        frame: str = _pages().frame_of(self)
        return frame

    def _page(self, title: str | None) -> str:
        """Return the HTML page; ``title`` None is the class name."""
        text: str = _pages().page_of(self, title)
        return text

    def _state(self) -> dict[str, Any]:
        """Return the constructor arguments by name, for ``save``."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def _pages() -> Any:
    """Import the module that draws pages."""
    return import_module(_PAGES, __package__.partition(".")[0])


class NamedTokens(Result, kind=False):
    """Base of results for tokens, which may have names.

    Attributes:
        names: names of the tokens of each example, or None.
    """

    names: Names | None

    def named(self, tokens: Sequence[str] | Sequence[Sequence[str]]) -> Self:
        """Return a copy with names for the tokens, which the HTML page shows.

        Args:
            tokens: a list of names for one sequence, or a list of such lists. Pass
                :class:`~captum_ssm.viz.Tokens` to draw the parts of a word without a gap.

        Returns:
            A shallow copy.

        Raises:
            InputError: if the number of names is not the number of tokens.
        """
        batch, length = self._tokens()
        return self._with_names(read_names(tokens, batch, length))

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary for each example and token (or patch).

        The keys are example, position, token (if tokens have names), and each kind of relevance.
        """
        columns = {name: values.flatten(1).tolist() for name, values in self._columns().items()}
        rows = []
        for example in range(self._tokens()[0]):
            relevance = {name: by_example[example] for name, by_example in columns.items()}
            token_column = {} if self.names is None else {"token": self.names[example]}
            keys = ("example", "position", *token_column, *relevance)
            # for images, methods may return pixels or patches; None fills the shorter columns
            token_values = zip_longest(*token_column.values(), *relevance.values())
            for position, values in enumerate(token_values):
                rows.append(dict(zip(keys, (example, position, *values), strict=True)))
        return rows

    def _columns(self) -> Mapping[str, Tensor]:
        """Return the columns of :meth:`rows`: relevance (B, L) by name."""
        raise NotImplementedError

    def _tokens(self) -> tuple[int, int]:
        """Return the number of examples and the number of tokens per example."""
        raise NotImplementedError

    def _with_names(self, names: Names) -> Self:
        """Return a copy with these names, which were checked before."""
        return replace(self, names=names)  # type: ignore[type-var]


def load(path: str | Path) -> Any:
    """Load a result that was saved by its ``save``.

    Args:
        path: the file.

    Returns:
        A result of the same class, with tensors on the CPU. Dtypes, shapes and values are exactly
        those of the saved result.

    Raises:
        DataNotFoundError: if there is no such file.
        DataError: if the file contains no result, or a result of a newer version.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from captum_ssm import LatimFlow, compare, load
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> found = compare(model, ids, [LatimFlow], target=(-1, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load(found.save(f"{folder}/found.json"))
        >>> torch.equal(again["LatimFlow"], found["LatimFlow"])
        True
    """
    file = existing_file(path, "a file that a result's save() wrote")
    wrong = f"{file} holds no result of captum_ssm"
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{wrong}: {error}. Pass a file that a result's save() wrote.") from None
    keys = {"captum_ssm", "form", "kind", "state"}
    if not isinstance(content, dict) or not keys <= content.keys():
        raise DataError(f"{wrong}. Pass a file that a result's save() wrote.")
    if content["form"] != _FORM or content["kind"] not in Result._kinds:
        raise DataError(
            f"{file} was written by captum_ssm {content['captum_ssm']}: {content['kind']} in "
            f"format {content['form']}. This is {__version__}, which reads "
            f"{', '.join(Result._kinds)} in format {_FORM}. Install that version, or save again."
        )
    try:
        return Result._kinds[content["kind"]](**_decode(content["state"]))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise DataError(
            f"{wrong} that can be read: {type(error).__name__}: {error}. Save the result again."
        ) from error


def read_names(tokens: Any, batch: int, length: int) -> Names:
    """Check names of tokens, and return one sequence of names per example."""
    # a list of strings has the names of one example
    sequences = [tokens] if all(isinstance(name, str) for name in tokens) else list(tokens)
    names = tuple(_as_names(sequence) for sequence in sequences)
    if isinstance(tokens, str) or [len(sequence) for sequence in names] != [length] * batch:
        raise InputError(
            f"tokens has {[len(sequence) for sequence in names]} names, but the result has {batch} "
            f"sequences of {length} tokens. Pass one list of {length} names per sequence."
        )
    return names


def _as_names(names: Sequence[Any]) -> Sequence[str]:
    """Convert names to a tuple; keep :class:`.Tokens`, which also has the pieces of the text."""
    return names if isinstance(names, Tokens) else tuple(map(str, names))


def _write(path: str | Path, text: str) -> Path:
    """Create the folder of a file, write the text, and return the path."""
    file = Path(path)
    make_folder(file.parent)
    write_whole(file, text)
    return file


def _in_notebook() -> bool:
    """Return True in a notebook; in a terminal, IPython's shell has no kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _encode(value: Any) -> Any:
    """Encode for JSON; dictionaries and types that JSON does not have become {type: content}."""
    if isinstance(value, Tensor):
        return {"tensor": _encode_tensor(value)}
    name = type(value).__name__
    if name in _PARTS:
        return {name: {f.name: _encode(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, range):
        return {"range": [value.start, value.stop]}
    if isinstance(value, tuple):
        return {"tuple": [_encode(x) for x in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(name): _encode(x) for name, x in value.items()}}
    if not isinstance(value, Sequence):
        raise InputError(f"The result contains {value!r} ({name}). Pass tensors, numbers or lists.")
    return [_encode(x) for x in value]


def _decode(code: Any) -> Any:
    """Convert the result of :func:`_encode` back to the value."""
    if isinstance(code, list):
        return [_decode(x) for x in code]
    if not isinstance(code, dict):
        return code
    ((name, content),) = code.items()
    if name == "tensor":
        return _decode_tensor(content)
    if name == "float":
        return float(content)
    if name == "range":
        return range(*content)
    if name == "tuple":
        return tuple(_decode(x) for x in content)
    if name == "dict":
        return {key: _decode(x) for key, x in content.items()}
    return _PARTS[name](**{key: _decode(x) for key, x in content.items()})


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    """Encode a tensor as a dictionary of dtype, shape and values (floats as doubles)."""
    flat = tensor.detach().cpu().flatten()
    values = (flat.double() if flat.is_floating_point() else flat).tolist()
    if flat.is_floating_point() and not bool(flat.isfinite().all()):
        values = [value if math.isfinite(value) else str(value) for value in values]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "values": values}


def _decode_tensor(code: Mapping[str, Any]) -> Tensor:
    """Convert the result of :func:`_encode_tensor` back to a tensor; raise for a damaged one."""
    dtype = getattr(torch, code["dtype"])
    if not isinstance(dtype, torch.dtype):  # another name of torch, in a damaged file
        raise ValueError(f"dtype={code['dtype']!r} is not a dtype of torch")
    values = code["values"]
    if dtype.is_floating_point:
        for value in values:
            if isinstance(value, str) and value not in _NO_NUMBERS:
                raise ValueError(f"values contains {value!r}, which is not a number")
        doubles = torch.tensor([float(value) for value in values], dtype=torch.float64)
        return doubles.to(dtype).view(code["shape"])
    return torch.tensor(values, dtype=dtype).view(code["shape"])
