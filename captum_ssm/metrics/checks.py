"""Check and convert the arguments of metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, NonFiniteError, OptionError
from ..operators.kernels.arithmetic import where_double_is


def as_scores(scores: Any, name: str, dims: int | None = None) -> Tensor:
    """Return ``scores`` as float32 or float64, and raise if they are not finite real numbers.

    Args:
        scores: a tensor of any real dtype; half precision becomes float32, integers float64.
        name: the name of the argument, for errors.
        dims: the required number of dimensions. Default: None, any number.
    """
    return _require_finite(_as_float(scores, name, dims), name)


def masked_scores(
    scores: Any, mask: Tensor | None, name: str, dims: int | None = None, *, features: bool = False
) -> tuple[Tensor, Tensor]:
    """Return converted scores, with 0 where the mask is False, and the mask as booleans.

    Scores where the mask is False, such as padding, may be NaN or infinite.

    Args:
        scores, name, dims: the arguments of :func:`as_scores`.
        mask: True for scores that are used. Default: None, all.
        features: whether scores have a last dimension that the mask does not have. Default: False.
    """
    converted = _as_float(scores, name, dims)
    used = as_mask(mask, converted[..., 0] if features else converted)
    unused = ~(used[..., None] if features else used)
    return _require_finite(converted.masked_fill(unused, 0), name), used


def _as_float(scores: Any, name: str, dims: int | None) -> Tensor:
    """Return scores as floats: half precision becomes float32, and integers float64."""
    if not isinstance(scores, Tensor):
        raise InputError(f"{name} is of type {type(scores).__name__}. Pass a tensor.")
    if scores.is_complex():
        raise InputError(f"{name} is complex and cannot be ranked. Pass real numbers.")
    if dims is not None and scores.dim() != dims:
        raise InputError(
            f"{name} has shape {tuple(scores.shape)}. Pass {dims} dimensions, examples first."
        )
    if scores.numel() == 0:
        raise InputError(f"{name} is empty: shape {tuple(scores.shape)}. Pass at least one number.")
    numbers = where_double_is(scores.detach())
    if not numbers.is_floating_point():
        return numbers.double()
    return numbers.float() if numbers.element_size() < 4 else numbers


def _require_finite(x: Tensor, name: str) -> Tensor:
    """Return ``x``, and raise if an entry is NaN or infinite, because it could not be ranked."""
    bad = int((~x.isfinite()).sum())
    if bad:
        raise NonFiniteError(
            f"{name} has NaN or infinity in {bad} of {x.numel()} entries. Pass finite numbers; for "
            "padding use mask, if the function has one."
        )
    return x


def as_flags(flags: Any, like: Tensor, name: str) -> Tensor:
    """Convert 0 and 1, in the shape of ``like``, to booleans; raise for other values or shapes."""
    if not isinstance(flags, Tensor):
        raise InputError(f"{name} is of type {type(flags).__name__}. Pass a tensor.")
    if flags.shape != like.shape:
        raise InputError(
            f"{name} has shape {tuple(flags.shape)}, but needs {tuple(like.shape)}. Pass one entry "
            "for each score."
        )
    if flags.dtype != torch.bool and not bool(((flags == 0) | (flags == 1)).all()):
        raise InputError(f"{name} has entries other than 0 and 1. Pass booleans, or only 0 and 1.")
    return flags.detach().to(like.device).bool()


def as_mask(mask: Tensor | None, like: Tensor, name: str = "mask") -> Tensor:
    """Return ``mask`` as booleans; for None, return True for every entry of ``like``."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return as_flags(mask, like, name)


def as_fractions(fractions: Any) -> Tensor:
    """Return increasing shares from 0 to 1 as a float64 tensor (F,) on the CPU."""
    try:
        shares = torch.as_tensor(fractions, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        shares = torch.empty(0)  # refused below
    if shares.dim() != 1 or not len(shares):
        raise OptionError(f"fractions={fractions!r}: pass a list of one or more numbers.")
    if not bool(((shares >= 0) & (shares <= 1)).all()):
        raise OptionError(f"fractions={fractions!r}: pass only numbers from 0 to 1.")
    if bool((shares[1:] <= shares[:-1]).any()):
        raise OptionError(f"fractions={fractions!r}: pass numbers in increasing order.")
    return shares


def check_positive(value: int, name: str) -> None:
    """Raise OptionError unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}: pass an integer of at least 1.")
