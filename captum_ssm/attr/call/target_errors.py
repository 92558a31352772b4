"""Errors for targets that do not fit the model's output. Each error shows a form that fits."""

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


def is_missing(output: Tensor) -> TargetError:
    """Return the error for target=None, if the model returns several values per example."""
    return TargetError(
        f"target=None, but the model returns {tuple(output.shape[1:])} numbers per example. "
        f"{_form(output)}"
    )


def is_no_integer(target: Any, part: Any, output: Tensor) -> TargetError:
    """Return the error for an index that is not an integer, such as a float, bool or text."""
    return TargetError(
        f"target={shown(target)} contains {part!r} of type {type(part).__name__}, which is not an "
        f"integer. {_form(output)}"
        + (" To pass the text of a token, also pass tokenizer=." if isinstance(part, str) else "")
    )


def is_of_another_batch(target: Any, count: int, output: Tensor) -> TargetError:
    """Return the error for a target with ``count`` entries, if the batch has a different size."""
    entries = "1 entry" if count == 1 else f"{count} entries"
    return TargetError(
        f"target={shown(target)} has {entries} for a batch of {len(output)} examples"
        f"{_meant_for_all(target, output)}. {_form(output)}"
    )


def is_of_other_dimensions(target: Any, row: Sequence[int], output: Tensor) -> TargetError:
    """Return the error for a target with more or fewer indices than the output has dimensions."""
    dims = output.dim() - 1
    count = f"{len(row)} {'index' if len(row) == 1 else 'indices'}"
    text = f"target={shown(target)} has {count} per example, but an output of shape "
    text += f"{tuple(output.shape)}, {_dimensions(output)}, needs {dims or 'none'}"
    if dims == 2 and len(row) == 1:
        text += ": a single int would select a position, not a token"
    text += _meant_for_all(target, output)
    token = row[0] if len(row) == 1 and 0 <= row[0] < output.shape[-1] else 0
    return TargetError(f"{text}. {_form(output, token)}")


def is_outside(target: Any, dimension: int, index: int, output: Tensor) -> TargetError:
    """Return the error for an index that is out of range in a ``dimension`` behind the batch."""
    size, name = output.shape[dimension + 1], _names(output)[dimension]
    return TargetError(
        f"target={shown(target)} is out of range for an output of shape {tuple(output.shape)}: "
        f"{name} {index} is not in [{-size}, {size}). Pass an index from 0 to {size - 1}, or from "
        f"{-size} to -1, counted from the end."
    )


def is_padded(index: Tensor, padded: Tensor, last: Tensor) -> TargetError:
    """Return the error for a target at a padded position.

    ``padded`` (B,) marks examples with this error; ``last`` (B,) has the last unpadded positions.
    """
    examples = padded.nonzero().flatten()
    first = int(examples[0])
    targets = [(int(at), int(token)) for at, token in zip(last, index[:, 1], strict=True)]
    return TargetError(
        f"The target's position {int(index[first, 0])} is a padded token of example {first}"
        + (f" and of {len(examples) - 1} more" if len(examples) > 1 else "")
        + f". The last unpadded tokens are at {in_few_words(last)}. Pass one target per example, "
        f"such as target={in_few_words(targets)}, or pad on the left."
    )


def in_few_words(entries: Tensor | Sequence[Any]) -> str:
    """Format a list for an error, with ``...`` after the first entries of a long list."""
    entries_list = entries.tolist() if isinstance(entries, Tensor) else list(entries)
    text = ", ".join(map(str, entries_list[:_ENTRIES]))
    return f"[{text}{', ...' if len(entries_list) > _ENTRIES else ''}]"


def shown(target: Any) -> str:
    """Format a target for an error, cut to one line."""
    if isinstance(target, Tensor | np.ndarray) and target.ndim:
        return f"{type(target).__name__} of shape {tuple(target.shape)} and {target.dtype}"
    text = repr(target)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _names(output: Tensor) -> list[str]:
    """Return names of the output's dimensions after the batch, such as position and token."""
    dims = output.dim() - 1
    return {1: ["class"], 2: ["position", "token"]}.get(dims, ["index"] * dims)


def _dimensions(output: Tensor) -> str:
    """Return the meaning of the output's dimensions for an error."""
    meanings = {1: "(batch)", 2: "(batch, classes)", 3: "(batch, positions, vocabulary)"}
    return meanings.get(output.dim(), f"(batch and {output.dim() - 1} more)")


def _form(output: Tensor, token: int = 0) -> str:
    """Return advice on the form of a target for this output, with an example."""
    batch, dims = len(output), output.dim() - 1
    if dims == 0:
        return "Pass target=None, because the model returns one number per example."
    if dims == 1:
        return (
            "Pass an int, for example target=0, or one int per example as a list or a 1-D tensor "
            f"of {batch}."
        )
    example = ", ".join(map(str, [-1] * (dims - 1) + [token]))
    names = ", ".join(_names(output)) if dims == 2 else f"{dims} indices"
    return (
        f"Pass a tuple ({names}), for example target=({example}), or one such tuple per example as "
        f"a list or a tensor of shape ({batch}, {dims})."
    )


def _meant_for_all(target: Any, output: Tensor) -> str:
    """Return a hint if the target looks like one example's indices, which must be a tuple."""
    dims = output.dim() - 1
    indices = target.tolist() if isinstance(target, Tensor | np.ndarray) else target
    if dims < 2 or not isinstance(indices, list) or len(indices) != dims:
        return ""
    if not all(isinstance(index, int) for index in indices):
        return ""
    return f"; to use {tuple(indices)} for all examples, pass a tuple"
