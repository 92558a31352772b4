"""Captum's target forms, checked, as one number per example."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OutputError
from . import target_errors


@dataclass(frozen=True)
class Each:
    """Several targets, each in one of Captum's forms, to be explained from one forward run."""

    targets: Sequence[Any]


@dataclass(frozen=True)
class Against:
    """A target, and what it is held against; see :func:`~captum_ssm.attr.contrast.contrasted`."""

    target: Any
    contrast: Any


def several(target: Any) -> Sequence[Any]:
    """The targets of an :class:`Each`, or the one target."""
    return target.targets if isinstance(target, Each) else (target,)


def as_asked(results: Sequence[Tensor], target: Any) -> Tensor:
    """One result per target, stacked in front; for a target that is no :class:`Each`, the one."""
    return torch.stack(list(results)) if isinstance(target, Each) else results[0]


def logits_of(output: Any) -> Tensor:
    """The tensor a target selects from: the output itself or its ``logits``."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    hidden = getattr(output, "last_hidden_state", None)
    if isinstance(hidden, Tensor):
        return hidden
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise OutputError(
        f"The model returned {type(output).__name__}, which is neither a tensor nor has .logits. "
        "Wrap it in a forward_func that returns a tensor, and name the module: "
        "Method(forward_func, model=module)."
    )


def target_index(target: Any, output: Tensor) -> Tensor | None:
    """The target as indices (B, dims of one example), or None if there is no target.

    Args:
        target: one of Captum's forms.
        output: what the model returned, (B, ...).
    """
    if target is None:
        return None
    batch, dims = output.shape[0], output.dim() - 1
    rows = _rows(target, output)
    for row in rows:
        if len(row) != dims:
            raise target_errors.is_of_other_dimensions(target, row, output)
        for place, (index, size) in enumerate(zip(row, output.shape[1:], strict=True)):
            if not -size <= index < size:
                raise target_errors.is_outside(target, place, index, output)
    sizes = torch.tensor(output.shape[1:], device=output.device)
    return torch.tensor(rows, device=output.device).reshape(batch, dims) % sizes


def select(output: Tensor, index: Tensor | None) -> Tensor:
    """One number per example, (B,)."""
    if index is not None:
        example = torch.arange(output.shape[0], device=output.device)
        return output[(example, *index.unbind(-1))]
    if output[0].numel() != 1:
        raise target_errors.is_missing(output)
    return output.reshape(-1)


def _rows(target: Any, output: Tensor) -> list[tuple[int, ...]]:
    """One tuple of indices per example."""
    plain = target.detach().cpu().numpy() if isinstance(target, Tensor) else target
    if isinstance(plain, np.ndarray | np.generic):
        plain = plain.item() if plain.size == 1 else plain.tolist()
    if isinstance(plain, tuple):
        return [_integers(plain, target, output)] * len(output)
    if not isinstance(plain, list):
        return [_integers((plain,), target, output)] * len(output)
    if len(plain) != len(output):
        raise target_errors.is_of_another_batch(target, len(plain), output)
    rows = (entry if isinstance(entry, tuple | list) else (entry,) for entry in plain)
    return [_integers(row, target, output) for row in rows]


def _integers(values: Sequence[Any], target: Any, output: Tensor) -> tuple[int, ...]:
    """The values as ints; a bool is none, though Python counts with it."""
    found = []
    for value in values:
        try:
            plain: Any = value.item() if isinstance(value, Tensor | np.generic) else value
            index = operator.index(plain)
        except (TypeError, ValueError, RuntimeError):
            raise target_errors.is_no_integer(target, value, output) from None
        if isinstance(plain, bool):
            raise target_errors.is_no_integer(target, value, output)
        found.append(index)
    return tuple(found)
