"""Errors for a target that does not fit the model's output, with a form that does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import TargetError

#: Characters of a target that an error repeats at most.
_SHOWN = 80
#: Entries of a list that it repeats at most.
_ENTRIES = 16


def is_missing(output: Tensor) -> TargetError:
    """Return the error for no target, if the model returns several numbers per example."""
    return TargetError(
        f"The model returns {tuple(output.shape[1:])} numbers per example, so a target is needed. "
        f"{_form(output)}"
    )


def is_no_integer(target: Any, part: Any, output: Tensor) -> TargetError:
    """Return the error for an index that is a float, a bool, a text or the like."""
    return TargetError(
        f"target={shown(target)} does not consist of integers: it holds {part!r}, of class "
        f"{type(part).__name__}. {_form(output)}"
        + " To name a token by its text, pass tokenizer=."
        * isinstance(part, str)
    )


def is_of_another_batch(target: Any, count: int, output: Tensor) -> TargetError:
    """Return the error for a list or tensor with more or fewer entries than examples."""
    entries = "1 entry" if count == 1 else f"{count} entries"
    return TargetError(
        f"target={shown(target)} has {entries} for a batch of {len(output)} examples"
        f"{_meant_for_all(target, output)}. {_form(output)}"
    )


def is_of_other_dimensions(target: Any, row: Sequence[int], output: Tensor) -> TargetError:
    """Return the error for more or fewer indices than one example's output has dimensions."""
    dims = output.dim() - 1
    found = f"{len(row)} {'index' if len(row) == 1 else 'indices'}"
    text = f"target={shown(target)} names {found} per example and does not fit an output of shape "
    text += f"{tuple(output.shape)}, {_dimensions(output)}, which takes {dims or 'none'}"
    if dims == 2 and len(row) == 1:
        text += ": a single int would select a position, not a token"
    text += _meant_for_all(target, output)
    token = row[0] if len(row) == 1 and 0 <= row[0] < output.shape[-1] else 0
    return TargetError(f"{text}. {_form(output, token)}")


def is_outside(target: Any, place: int, index: int, output: Tensor) -> TargetError:
    """Return the error for an index beyond the size of its dimension."""
    size, name = output.shape[place + 1], _names(output)[place]
    return TargetError(
        f"target={shown(target)} is out of range for an output of shape {tuple(output.shape)}: "
        f"{name} {index} is not in [{-size}, {size}). A {name} is numbered from 0 to {size - 1}, "
        f"or from the end, {-size} to -1."
    )


def is_padded(index: Tensor, padded: Tensor, last: Tensor) -> TargetError:
    """Return the error for a position that is padding.

    ``padded`` (B,) is True for such examples, ``last`` (B,) the last real position of each.
    """
    examples = padded.nonzero().flatten()
    first = int(examples[0])
    better = [(int(at), int(token)) for at, token in zip(last, index[:, 1], strict=True)]
    return TargetError(
        f"The target's position {int(index[first, 0])} is a padded token of example {first}"
        + (f" and of {len(examples) - 1} more" if len(examples) > 1 else "")
        + f". The last real token of each example is at {in_few_words(last)}: pass one target per "
        f"example, such as target={in_few_words(better)}, or pad on the left."
    )


def in_few_words(entries: Tensor | Sequence[Any]) -> str:
    """Return a list in words, a long one cut short."""
    listed = entries.tolist() if isinstance(entries, Tensor) else list(entries)
    shown_ones = ", ".join(map(str, listed[:_ENTRIES]))
    return f"[{shown_ones}{', ...' if len(listed) > _ENTRIES else ''}]"


def shown(target: Any) -> str:
    """Return a target in few words."""
    if isinstance(target, Tensor | np.ndarray) and target.ndim:
        return f"{type(target).__name__} of shape {tuple(target.shape)} and {target.dtype}"
    text = repr(target)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _names(output: Tensor) -> list[str]:
    """Return names of the dimensions behind the batch."""
    dims = output.dim() - 1
    return {1: ["class"], 2: ["position", "token"]}.get(dims, ["index"] * dims)


def _dimensions(output: Tensor) -> str:
    known = {1: "(batch)", 2: "(batch, classes)", 3: "(batch, positions, vocabulary)"}
    return known.get(output.dim(), f"(batch and {output.dim() - 1} more)")


def _form(output: Tensor, token: int = 0) -> str:
    """Return the form of a target that fits this output, with an example."""
    batch, dims = len(output), output.dim() - 1
    if dims == 0:
        return "Leave the target out: the model returns one number per example."
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
    """Return a hint for a list or tensor of one example's indices, which should be a tuple."""
    dims = output.dim() - 1
    flat = target.tolist() if isinstance(target, Tensor | np.ndarray) else target
    if dims < 2 or not isinstance(flat, list) or len(flat) != dims:
        return ""
    if not all(isinstance(index, int) for index in flat):
        return ""
    return f"; if {tuple(flat)} is meant for all examples, it must be a tuple"
