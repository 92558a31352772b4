"""Captum's target forms, checked, as one number per example; what a target is held against."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import NonFiniteError, OptionError, OutputError, TargetError
from . import target_errors

if TYPE_CHECKING:
    from .head import Kept


@dataclass(frozen=True)
class Each:
    """Several targets, each in one of Captum's forms, to be explained from one forward run."""

    targets: Sequence[Any]


@dataclass(frozen=True)
class Against:
    """A target, and what it is held against; see :func:`contrasted`."""

    target: Any
    contrast: Any


def several(target: Any) -> Sequence[Any]:
    """The targets of an :class:`Each`, or the one target."""
    return target.targets if isinstance(target, Each) else (target,)


def each_of(targets: Any) -> Each:
    """A user's list of targets, each in one of Captum's forms.

    Raises:
        TargetError: when it is no list, or empty.
    """
    if isinstance(targets, str) or not hasattr(targets, "__len__"):
        raise TargetError(
            f"targets={target_errors.shown(targets)} must be a list of targets in Captum's forms, "
            "such as [(-1, 3), (-1, 5)]."
        )
    if not len(targets):
        raise TargetError("targets is empty; pass a list of targets in Captum's forms.")
    return Each(list(targets))


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


def last_real(mask: Tensor) -> Tensor:
    """The position of each example's last real token, (B,); -1 where there is none.

    Args:
        mask: True for real tokens (B, L).
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, position, -1).amax(-1)


def require_real_target(index: Tensor | None, output: Tensor, mask: Tensor | None) -> None:
    """Raise if the target names what a model returns at a padded token.

    Args:
        index: the target's indices (B, dims of one example), or None.
        output: what the model returned, (B, ...); its positions are tokens where it is (B, L, V).
        mask: True for real tokens (B, L), or None.

    Raises:
        TargetError: naming the examples, and where their last real tokens are.
    """
    if index is None or mask is None or output.dim() != 3 or output.shape[1] != mask.shape[1]:
        return
    index, mask = index.cpu(), mask.cpu()
    padded = ~mask.gather(1, index[:, :1])[:, 0]  # (B,)
    if bool(padded.any()):
        raise target_errors.is_padded(index, padded, last_real(mask))


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


CONTRASTS = ("mean", "others", "all")


def contrasted(
    output: Tensor, target: Any, contrast: Any = None, kept: Kept | None = None
) -> tuple[Tensor, Tensor | None]:
    """The number to explain per example (B,), linear in the output, and its constant summand.

    Args:
        output: what the model returned, (B, ..., V).
        target: one of Captum's forms.
        contrast: None for the output itself; ``"mean"``, less the mean over the last dimension;
            ``"others"``, the log-odds against all other entries; ``"all"``, the log-probability;
            or a second target, whose output is taken off. Logarithms are linear in the output
            with the probabilities frozen; the entropy that this leaves is the constant.
            Default: None.
        kept: the positions that the output is of. Default: None, all.

    Raises:
        TargetError, OptionError: when the target or the contrast does not fit the output.
        NonFiniteError: when the number is NaN or infinite, as where the model overflows.
    """
    asked = (target, contrast) if kept is None else kept.among(output, target, contrast)
    number, constant = _contrasted(output, *asked)
    if not bool(torch.isfinite(number).all()):
        example = int((~torch.isfinite(number)).nonzero()[0])
        found = float(number.detach()[example])
        raise NonFiniteError(
            f"The model's output for target={target!r} is {found} for example "
            f"{example}, which cannot be divided into parts. Run the model in a wider dtype than "
            f"{output.dtype}, or choose a target whose output is finite."
        )
    return number, constant


def _contrasted(output: Tensor, target: Any, contrast: Any) -> tuple[Tensor, Tensor | None]:
    index = target_index(target, output)
    chosen = select(output, index)
    if contrast is None:
        return chosen, None
    if not isinstance(contrast, str):
        return chosen - select(output, second_index(contrast, output)), None
    if contrast not in CONTRASTS or index is None:
        raise OptionError(
            f"contrast={contrast!r} with target={target!r}: use None, a second target, or, with a "
            f"target, one of {CONTRASTS}."
        )
    example = torch.arange(len(output), device=output.device)
    entries = output[(example, *index[:, :-1].unbind(-1))]  # (B, V)
    if contrast == "mean":
        return chosen - entries.mean(-1), None
    scores = entries.detach().to(torch.promote_types(entries.dtype, torch.float32))
    if contrast == "others":
        if entries.shape[-1] == 1:
            raise OptionError("contrast='others', but the output has one entry and no others.")
        scores = scores.scatter(1, index[:, -1:], float("-inf"))
    shares = torch.softmax(scores, -1)
    entropy = torch.special.entr(shares).sum(-1)
    return chosen - (shares.to(entries) * entries).sum(-1) - entropy.to(entries), -entropy


def second_index(contrast: Any, output: Tensor) -> Tensor | None:
    """What a target is held against, as indices like those of :func:`target_index`.

    Args:
        contrast: a second target.
        output: what the model returned, (B, ...).
    """
    try:
        return target_index(contrast, output)
    except TargetError as error:
        raise TargetError(f"contrast={contrast!r} is read as a second target. {error}") from None
