"""Captum's forms of targets, checked, as one number per example; contrasts of targets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import NonFiniteError, OptionError, OutputError, TargetError
from ...operators.kernels.truths import holds
from . import target_errors
from .checks import as_integer

if TYPE_CHECKING:
    from .head import Kept


@dataclass(frozen=True)
class Each:
    """Several targets, each in one of Captum's forms, to be explained from one forward run."""

    targets: Sequence[Any]


class SumTarget:
    """A target that is a weighted sum over several tokens of a language model's output.

    One number, and so one backward pass, however many tokens a text has.

    Args:
        positions: where the model predicts them (B, n), or (n,) for all examples alike.
        tokens: which tokens, in the same shape.
        weights: how often each counts, in the same shape. Default: None, once.

    Raises:
        TargetError: when they are not integers of one shape, or weights no numbers.

    Example:
        >>> import torch
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm import SumTarget
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp .")])
        >>> both = LatimFlow(model).attribute(ids, target=SumTarget([2, 3], ids[0, 3:]))
        >>> one, other = (LatimFlow(model).attribute(ids, (p, int(ids[0, p + 1]))) for p in (2, 3))
        >>> torch.allclose(both, one + other, atol=1e-5)
        True
    """

    def __init__(self, positions: Any, tokens: Any, weights: Any = None) -> None:
        self.positions, self.tokens = _listed("positions", positions), _listed("tokens", tokens)
        each = torch.ones(self.positions.shape) if weights is None else torch.as_tensor(weights)
        self.weights = each[None] if each.dim() == 1 else each
        shapes = [tuple(x.shape) for x in (self.positions, self.tokens, self.weights)]
        if len(set(shapes)) > 1 or not self.positions.numel():
            raise TargetError(
                f"SumTarget has positions {shapes[0]}, tokens {shapes[1]} and weights {shapes[2]}. "
                "Pass as many of each, at least one."
            )

    def __repr__(self) -> str:
        return f"SumTarget({self.positions.tolist()}, {self.tokens.tolist()})"

    def with_positions(self, positions: Tensor) -> SumTarget:
        """Return a target of the same tokens and weights at other positions (B, n)."""
        return SumTarget(
            positions, self.tokens.expand_as(positions), self.weights.expand_as(positions)
        )

    def part(self, cut: Callable[[Tensor], Tensor]) -> SumTarget:
        """Return the target of a part of a batch, which ``cut`` takes out of a tensor (B, n)."""
        if len(self.positions) == 1:
            return self
        return SumTarget(cut(self.positions), cut(self.tokens), cut(self.weights))


def _listed(name: str, values: Any) -> Tensor:
    """Return integers (n,) or (B, n) as (B, n)."""
    found = torch.as_tensor(values).detach().cpu()
    if found.is_floating_point() or found.dtype == torch.bool or found.dim() not in (1, 2):
        raise TargetError(
            f"SumTarget takes {name} that are integers (n,) or (B, n), got {values!r}."
        )
    return (found[None] if found.dim() == 1 else found).long()


@dataclass(frozen=True)
class Against:
    """A target and its contrast; see :func:`contrasted`.

    For a target at a position, a contrast that is an int is another entry at the same position.
    """

    target: Any
    contrast: Any

    def __post_init__(self) -> None:
        entry = as_integer(self.contrast)
        if entry is not None and isinstance(self.target, tuple) and len(self.target) > 1:
            object.__setattr__(self, "contrast", (*self.target[:-1], entry))


def several(target: Any) -> Sequence[Any]:
    """Return the targets of an :class:`Each`, or the one target."""
    return target.targets if isinstance(target, Each) else (target,)


def each_of(targets: Any) -> Each:
    """Read a user's list of targets, each in one of Captum's forms."""
    if isinstance(targets, str) or not hasattr(targets, "__len__"):
        raise TargetError(
            f"targets={target_errors.shown(targets)} must be a list of targets in Captum's forms, "
            "such as [(-1, 3), (-1, 5)]."
        )
    if not len(targets):
        raise TargetError("targets is empty; pass a list of targets in Captum's forms.")
    return Each(list(targets))


def as_asked(results: Sequence[Tensor], target: Any) -> Tensor:
    """Stack one result per target of an :class:`Each`; for another target return its result."""
    return torch.stack(list(results)) if isinstance(target, Each) else results[0]


def logits_of(output: Any) -> Tensor:
    """Return the tensor that a target selects from: the output itself or its ``logits``."""
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
    """Return the target as indices (B, dims of one example) on the host; None for no target.

    A :class:`SumTarget` has several for each example, (B, n, 2). The output is (B, ...).
    """
    if target is None:
        return None
    batch, dims = output.shape[0], output.dim() - 1
    if isinstance(target, SumTarget):
        return _indices(target, output)
    rows = _rows(target, output)
    for row in rows:
        if len(row) != dims:
            raise target_errors.is_of_other_dimensions(target, row, output)
        for place, (index, size) in enumerate(zip(row, output.shape[1:], strict=True)):
            if not -size <= index < size:
                raise target_errors.is_outside(target, place, index, output)
    sizes = torch.tensor(output.shape[1:], device="cpu")
    return torch.tensor(rows, device="cpu").reshape(batch, dims) % sizes


def _indices(target: SumTarget, output: Tensor) -> Tensor:
    """Return the positions and tokens of a :class:`SumTarget` as indices (B, n, 2)."""
    batch = len(output)
    if output.dim() != 3 or len(target.positions) not in (1, batch):
        raise TargetError(
            f"target={target!r} is of tokens of a language model's output (B, L, vocabulary), for "
            f"{len(target.positions)} examples, but the output is {tuple(output.shape)}."
        )
    found = []
    for place, values in enumerate((target.positions, target.tokens)):
        size = output.shape[1 + place]
        outside = values[(values < -size) | (values >= size)]
        if len(outside):
            raise target_errors.is_outside(target, place, int(outside[0]), output)
        found.append((values % size).expand(batch, -1))
    return torch.stack(found, -1)


def last_real(mask: Tensor) -> Tensor:
    """Return each example's last real token (B,) by a mask (B, L); -1 if there is none."""
    position = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, position, -1).amax(-1)


def require_real_target(index: Tensor | None, output: Tensor, mask: Tensor | None) -> None:
    """Raise if the target names the model's output at a padded token.

    Args:
        index: the target's indices (B, [n,] dims of one example), or None.
        output: the model's output, (B, ...); its positions are tokens if it is (B, L, V).
        mask: True for real tokens (B, L), or None.
    """
    if index is None or mask is None or output.dim() != 3 or output.shape[1] != mask.shape[1]:
        return
    at = index[..., 0].reshape(len(mask), -1)
    if holds(mask.gather(1, at.to(mask.device)).all()):
        return
    index, mask = index.cpu(), mask.cpu()
    padded = ~mask.gather(1, at.cpu()).all(1)  # (B,)
    raise target_errors.is_padded(index, padded, last_real(mask))


def select(output: Tensor, index: Tensor | None) -> Tensor:
    """Select one number per example, (B,)."""
    if index is not None:
        example = torch.arange(output.shape[0], device=output.device)
        return output[(example, *index.unbind(-1))]
    if output[0].numel() != 1:
        raise target_errors.is_missing(output)
    return output.reshape(-1)


def _rows(target: Any, output: Tensor) -> list[tuple[int, ...]]:
    """Return one tuple of indices per example."""
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
    """Return the values as ints; refuse bools."""
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


CONTRASTS = ("mean", "others", "all", "runner-up")


def contrasted(
    output: Tensor, target: Any, contrast: Any = None, kept: Kept | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the number to explain per example (B,), linear in the output, and its constant part.

    Args:
        output: the model's output, (B, ..., V).
        target: one of Captum's forms.
        contrast: None for the output itself, or one of the forms of :meth:`LatimFlow.attribute`.
            ``"others"`` and ``"all"`` are linear with the probabilities frozen; the entropy that
            this leaves is the constant. Default: None.
        kept: the positions that the output is of. Default: None, all.

    Raises:
        TargetError, OptionError: when the target or the contrast does not fit the output.
        NonFiniteError: when the number is NaN or infinite, such as after an overflow.
    """
    asked = (target, contrast) if kept is None else kept.among(output, target, contrast)
    number, constant = _contrasted(output, *asked)
    if not holds(torch.isfinite(number).all()):
        example = int((~torch.isfinite(number)).nonzero()[0])
        found = float(number.detach()[example])
        raise NonFiniteError(
            f"The model's output for target={target!r} is {found} for example "
            f"{example}, which cannot be divided into parts. Run the model in a wider dtype than "
            f"{output.dtype}, or choose a target whose output is finite."
        )
    return number, constant


def _contrasted(output: Tensor, target: Any, contrast: Any) -> tuple[Tensor, Tensor | None]:
    """Return the number and its constant, not yet checked to be finite."""
    index = target_index(target, output)
    if contrast is not None and not isinstance(contrast, str):
        second = second_index(contrast, output)
        return _summed(output, target, index) - _summed(output, contrast, second), None
    if contrast is None:
        return _summed(output, target, index), None
    if contrast not in CONTRASTS or index is None:
        raise OptionError(
            f"contrast={contrast!r} with target={target!r}: use None, a second target, or, with a "
            f"target, one of {CONTRASTS}."
        )
    if contrast in ("others", "runner-up") and output.shape[-1] == 1:
        raise OptionError(f"contrast={contrast!r}, but the output has one entry and no others.")
    several = index if index.dim() == 3 else index[:, None]  # (B, n, dims)
    several = several.to(output.device)
    example = torch.arange(len(output), device=output.device)[:, None]
    entries = output[(example, *several[..., :-1].unbind(-1))]  # (B, n, V)
    chosen = entries.gather(-1, several[..., -1:])[..., 0]
    number, constant = _against(entries, several[..., -1:], chosen, contrast)
    if not isinstance(target, SumTarget):
        return number[:, 0], None if constant is None else constant[:, 0]
    weights = target.weights.to(number)
    return (number * weights).sum(1), None if constant is None else (constant * weights).sum(1)


def _against(
    entries: Tensor, tokens: Tensor, chosen: Tensor, contrast: str
) -> tuple[Tensor, Tensor | None]:
    """Contrast entries (B, n, V) with others at their positions; return numbers, constants (B, n).

    ``tokens`` (B, n, 1) are the indices of the ``chosen`` entries (B, n).
    """
    if contrast == "mean":
        return chosen - entries.mean(-1), None
    scores = entries.detach().to(torch.promote_types(entries.dtype, torch.float32))
    if contrast != "all":
        scores = scores.scatter(-1, tokens, float("-inf"))
    if contrast == "runner-up":
        return chosen - entries.gather(-1, scores.argmax(-1, keepdim=True))[..., 0], None
    shares = torch.softmax(scores, -1)
    entropy = torch.special.entr(shares).sum(-1)
    return chosen - (shares.to(entries) * entries).sum(-1) - entropy.to(entries), -entropy


def _summed(output: Tensor, target: Any, index: Tensor | None) -> Tensor:
    """Return one number per example (B,), for a :class:`SumTarget` the weighted sum."""
    if not isinstance(target, SumTarget):
        return select(output, index)
    assert index is not None
    example = torch.arange(len(output), device=output.device)[:, None]
    chosen = output[(example, *index.unbind(-1))]
    return (chosen * target.weights.to(chosen)).sum(1)


def second_index(contrast: Any, output: Tensor) -> Tensor | None:
    """Return a contrast that is a second target as indices, like :func:`target_index`."""
    try:
        return target_index(contrast, output)
    except TargetError as error:
        raise TargetError(f"contrast={contrast!r} is read as a second target. {error}") from None
