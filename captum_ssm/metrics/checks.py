"""Checks of the tensors that metrics take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, NonFiniteError, OptionError
from ..operators.kernels.arithmetic import where_double_is


def as_scores(scores: Any, name: str, dims: int | None = None) -> Tensor:
    """Return ``scores``, half precision converted to float32 and integers to float64.

    Args:
        scores: finite numbers of any real dtype.
        name: their name in errors.
        dims: the required number of dimensions. Default: None, any number.
    """
    return _finite(_numbers(scores, name, dims), name)


def masked_scores(
    scores: Any, mask: Tensor | None, name: str, dims: int | None = None, *, features: bool = False
) -> tuple[Tensor, Tensor]:
    """Return scores as :func:`as_scores`, 0 where the mask is False, and the mask as booleans.

    Scores that do not count, such as padding, may be NaN or infinite.

    Args:
        scores, name, dims: as in :func:`as_scores`.
        mask: True for scores that count. Default: None, all.
        features: whether the mask lacks the scores' last dimension. Default: False.
    """
    found = _numbers(scores, name, dims)
    counts = as_mask(mask, found[..., 0] if features else found)
    return _finite(found.masked_fill(~(counts[..., None] if features else counts), 0), name), counts


def _numbers(scores: Any, name: str, dims: int | None) -> Tensor:
    """Convert half precision to float32, integers to float64."""
    if not isinstance(scores, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(scores).__name__}.")
    if scores.is_complex():
        raise InputError(f"{name} is complex, so it has no order. Pass real numbers.")
    if dims is not None and scores.dim() != dims:
        raise InputError(
            f"{name} has shape {tuple(scores.shape)}; {dims} dimensions are needed, examples first."
        )
    if scores.numel() == 0:
        raise InputError(f"{name} is empty: shape {tuple(scores.shape)}.")
    found = where_double_is(scores.detach())
    if not found.is_floating_point():
        return found.double()
    return found.float() if found.element_size() < 4 else found


def _finite(x: Tensor, name: str) -> Tensor:
    """Return ``x``; raise if a number is NaN or infinite, because such a number has no rank."""
    bad = int((~x.isfinite()).sum())
    if bad:
        raise NonFiniteError(
            f"{name} holds NaN or infinity in {bad} of {x.numel()} entries. Find out where they "
            "come from; a metric of them would mean nothing."
        )
    return x


def as_flags(flags: Any, like: Tensor, name: str) -> Tensor:
    """Return flags (booleans, or 0 and 1) as booleans of the shape and device of ``like``."""
    if not isinstance(flags, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(flags).__name__}.")
    if flags.shape != like.shape:
        raise InputError(
            f"{name} has shape {tuple(flags.shape)}, but {tuple(like.shape)} is needed: one entry "
            "for each that is scored."
        )
    if flags.dtype != torch.bool and not bool(((flags == 0) | (flags == 1)).all()):
        raise InputError(f"{name} must hold nothing but 0 and 1, or be boolean.")
    return flags.detach().to(like.device).bool()


def as_mask(mask: Tensor | None, like: Tensor, name: str = "mask") -> Tensor:
    """Return ``mask`` as booleans; without a mask, True everywhere."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return as_flags(mask, like, name)


def as_fractions(fractions: Any) -> Tensor:
    """Return shares to change, (F,), in float64 on the CPU."""
    try:
        found = torch.as_tensor(fractions, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.dim() != 1 or not len(found):
        raise OptionError(f"fractions={fractions!r}: pass a list of one or more numbers.")
    if not bool(((found >= 0) & (found <= 1)).all()):
        raise OptionError(f"fractions={fractions!r}: each must be between 0 and 1.")
    if bool((found[1:] <= found[:-1]).any()):
        raise OptionError(f"fractions={fractions!r}: each must be above the one before.")
    return found


def check_positive(value: int, name: str) -> None:
    """Raise unless ``value`` is a whole number, 1 or above."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}: use a whole number, 1 or above.")
