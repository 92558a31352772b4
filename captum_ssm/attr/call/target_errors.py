"""Errors for targets that do not fit the model's output; each shows a form that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import TargetError

#: Largest number of characters of a target in an error.
_SHOWN = 80
#: Largest number of list entries in an error.
_ENTRIES = 16


def missing_target(output: Tensor) -> TargetError:
    """Return the error for target=None, if the model returns several values per example."""
    return TargetError(
        f"target=None, but the model returns {tuple(output.shape[1:])} numbers per example. "
        f"{_accepted_form(output)}"
    )


def index_not_integer(target: Any, part: Any, output: Tensor) -> TargetError:
    """Return the error for an index that is not an integer, such as a float, bool or text."""
    return TargetError(
        f"target={format_target(target)} contains {part!r} of type {type(part).__name__}, which is "
        f"not an integer. {_accepted_form(output)}"
        + (" To pass the text of a token, also pass tokenizer=." if isinstance(part, str) else "")
    )


def wrong_batch_size(target: Any, count: int, output: Tensor) -> TargetError:
    """Return the error for a target with ``count`` entries, if the batch has a different size."""
    entries = "1 entry" if count == 1 else f"{count} entries"
    return TargetError(
        f"target={format_target(target)} has {entries} for a batch of {len(output)} examples"
        f"{_tuple_hint(target, output)}. {_accepted_form(output)}"
    )


def wrong_dimensions(target: Any, row: Sequence[int], output: Tensor) -> TargetError:
    """Return the error for an example's ``row`` of indices, too many or few for the output."""
    dims = output.dim() - 1
    count = f"{len(row)} {'index' if len(row) == 1 else 'indices'}"
    message = f"target={format_target(target)} has {count} per example, but an output of shape "
    message += f"{tuple(output.shape)}, {_dimension_meanings(output)}, needs {dims or 'none'}"
    if dims == 2 and len(row) == 1:
        message += ": a single int would select a position, not a token"
    message += _tuple_hint(target, output)
    token = row[0] if len(row) == 1 and 0 <= row[0] < output.shape[-1] else 0  # probably meant
    return TargetError(f"{message}. {_accepted_form(output, token)}")


def index_out_of_range(target: Any, dimension: int, index: int, output: Tensor) -> TargetError:
    """Return the error for an index that is out of range in a ``dimension`` behind the batch."""
    size, name = output.shape[dimension + 1], _dimension_names(output)[dimension]
    return TargetError(
        f"target={format_target(target)} is out of range for an output of shape "
        f"{tuple(output.shape)}: {name} {index} is not in [{-size}, {size}). Pass an index from 0 "
        f"to {size - 1}, or from {-size} to -1, counted from the end."
    )


def padded_target(index: Tensor, is_padded_example: Tensor, last_real: Tensor) -> TargetError:
    """Return the error for a target at a padded position.

    ``index`` (B, 2) has each example's position and token; ``is_padded_example`` (B,) marks
    examples with this error; ``last_real`` (B,) has the last unpadded positions.
    """
    examples = is_padded_example.nonzero().flatten()
    first = int(examples[0])
    targets = [(int(p), int(token)) for p, token in zip(last_real, index[:, 1], strict=True)]
    return TargetError(
        f"The target's position {int(index[first, 0])} is a padded token of example {first}"
        + (f" and of {len(examples) - 1} more" if len(examples) > 1 else "")
        + f". The last unpadded tokens are at {format_list(last_real)}. Pass one target per "
        f"example, such as target={format_list(targets)}, or pad on the left."
    )


def format_list(entries: Tensor | Sequence[Any]) -> str:
    """Format a list for an error, with ``...`` after the first entries of a long list."""
    entries_list = entries.tolist() if isinstance(entries, Tensor) else list(entries)
    text = ", ".join(map(str, entries_list[:_ENTRIES]))
    return f"[{text}{', ...' if len(entries_list) > _ENTRIES else ''}]"


def format_target(target: Any) -> str:
    """Format a target for an error, cut to one line."""
    if isinstance(target, Tensor | np.ndarray) and target.ndim:
        return f"{type(target).__name__} of shape {tuple(target.shape)} and {target.dtype}"
    text = repr(target)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _dimension_names(output: Tensor) -> list[str]:
    """Return names of the output's dimensions after the batch, such as position and token."""
    dims = output.dim() - 1
    return {1: ["class"], 2: ["position", "token"]}.get(dims, ["index"] * dims)


def _dimension_meanings(output: Tensor) -> str:
    """Return the meaning of the output's dimensions for an error."""
    meanings = {1: "(batch)", 2: "(batch, classes)", 3: "(batch, positions, vocabulary)"}
    return meanings.get(output.dim(), f"(batch and {output.dim() - 1} more)")


def _accepted_form(output: Tensor, token: int = 0) -> str:
    """Return advice on the form of a target for this output; ``token`` is used as an example."""
    batch, dims = len(output), output.dim() - 1
    if dims == 0:
        return "Pass target=None, because the model returns one number per example."
    if dims == 1:
        return (
            "Pass an int, for example target=0, or one int per example as a list or a 1-D tensor "
            f"of {batch}."
        )
    example = ", ".join(map(str, [-1] * (dims - 1) + [token]))
    names = ", ".join(_dimension_names(output)) if dims == 2 else f"{dims} indices"
    return (
        f"Pass a tuple ({names}), for example target=({example}), or one such tuple per example as "
        f"a list or a tensor of shape ({batch}, {dims})."
    )


def _tuple_hint(target: Any, output: Tensor) -> str:
    """Return a hint if a list (one entry per example) looks like one tuple for all, else ""."""
    dims = output.dim() - 1
    indices = target.tolist() if isinstance(target, Tensor | np.ndarray) else target
    if dims < 2 or not isinstance(indices, list) or len(indices) != dims:
        return ""
    if not all(isinstance(index, int) for index in indices):
        return ""
    return f"; to use {tuple(indices)} for all examples, pass a tuple"
