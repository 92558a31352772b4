"""Check targets and contrasts in Captum's forms, and select one output value per example."""

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
    """A target that is a weighted sum of logits of several tokens of a language model.

    The sum is a scalar, so one backward pass is enough for any number of tokens.

    Args:
        positions: positions at which the tokens are predicted (B, n), or (n,) for all examples.
        tokens: token ids, in the same shape.
        weights: factor of each token's logit, in the same shape. Default: None, 1 for each.

    Raises:
        TargetError: if positions or tokens are not integers, or if the shapes differ.

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
        self.positions, self.tokens = _as_2d("positions", positions), _as_2d("tokens", tokens)
        factors = torch.ones(self.positions.shape) if weights is None else torch.as_tensor(weights)
        self.weights = factors[None] if factors.dim() == 1 else factors
        shapes = [tuple(x.shape) for x in (self.positions, self.tokens, self.weights)]
        if len(set(shapes)) > 1 or not self.positions.numel():
            raise TargetError(
                f"SumTarget has positions of shape {shapes[0]}, tokens of shape {shapes[1]} and "
                f"weights of shape {shapes[2]}. Pass equal shapes, with at least one entry."
            )

    def __repr__(self) -> str:
        return f"SumTarget({self.positions.tolist()}, {self.tokens.tolist()})"

    def with_positions(self, positions: Tensor) -> SumTarget:
        """Return a target with the same tokens and weights at different positions (B, n)."""
        return SumTarget(
            positions, self.tokens.expand_as(positions), self.weights.expand_as(positions)
        )

    def part(self, take_part: Callable[[Tensor], Tensor]) -> SumTarget:
        """Return the target for a part of the batch; ``take_part`` selects it from a tensor."""
        if len(self.positions) == 1:  # for all examples
            return self
        return SumTarget(take_part(self.positions), take_part(self.tokens), take_part(self.weights))


def _as_2d(name: str, values: Any) -> Tensor:
    """Check a :class:`SumTarget`'s positions or tokens (n,) or (B, n); return them as (B, n)."""
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(())  # is refused below
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() not in (1, 2):
        raise TargetError(
            f"SumTarget has {name}={values!r}. Pass a list or tensor of integers, (n,) or (B, n)."
        )
    return (tensor[None] if tensor.dim() == 1 else tensor).long()


@dataclass(frozen=True)
class Against:
    """A target and its contrast; see :func:`contrasted`.

    If the target has a position, an int as the contrast becomes (the target's position, int).
    """

    target: Any
    contrast: Any

    def __post_init__(self) -> None:
        token = as_integer(self.contrast)
        if token is not None and isinstance(self.target, tuple) and len(self.target) > 1:
            object.__setattr__(self, "contrast", (*self.target[:-1], token))


def several(target: Any) -> Sequence[Any]:
    """Return the targets of an :class:`Each`; put any other target into a tuple."""
    return target.targets if isinstance(target, Each) else (target,)


def each_of(targets: Any) -> Each:
    """Convert a list of targets, each in one of Captum's forms, to an :class:`Each`."""
    if isinstance(targets, str) or not hasattr(targets, "__len__"):
        raise TargetError(
            f"targets={target_errors.format_target(targets)} is not a list. Pass a list of targets "
            "in Captum's forms, such as [(-1, 3), (-1, 5)]."
        )
    if not len(targets):
        raise TargetError("targets is empty. Pass a list of targets in Captum's forms.")
    return Each(list(targets))


def as_asked(results: Sequence[Tensor], target: Any) -> Tensor:
    """Stack the results of an :class:`Each` target; return the only result of any other target."""
    return torch.stack(list(results)) if isinstance(target, Each) else results[0]


def logits_of(output: Any) -> Tensor:
    """Return the tensor that targets refer to: the output, or its ``logits``, for example."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    hidden = getattr(output, "last_hidden_state", None)  # a model without a head
    if isinstance(hidden, Tensor):
        return hidden
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise OutputError(
        f"The model returned {type(output).__name__}, which is not a tensor and has no .logits. "
        "Pass a forward_func that returns a tensor, and the module: Method(forward_func, "
        "model=module)."
    )


def target_index(target: Any, output: Tensor) -> Tensor | None:
    """Convert a target to indices (B, D) on the CPU, or (B, n, 2) for a :class:`SumTarget`.

    D is the number of the output's dimensions after the batch. For target=None the result is None.
    """
    if target is None:
        return None
    batch, dims = output.shape[0], output.dim() - 1
    if isinstance(target, SumTarget):
        return _sum_target_index(target, output)
    rows = _index_rows(target, output)  # one per example
    for row in rows:
        if len(row) != dims:
            raise target_errors.wrong_dimensions(target, row, output)
        for dimension, (index, size) in enumerate(zip(row, output.shape[1:], strict=True)):
            if not -size <= index < size:
                raise target_errors.index_out_of_range(target, dimension, index, output)
    sizes = torch.tensor(output.shape[1:], device="cpu")  # % sizes makes indices nonnegative
    return torch.tensor(rows, device="cpu").reshape(batch, dims) % sizes


def _sum_target_index(target: SumTarget, output: Tensor) -> Tensor:
    """Return the positions and tokens of a :class:`SumTarget` as nonnegative indices (B, n, 2)."""
    batch = len(output)
    if output.dim() != 3 or len(target.positions) not in (1, batch):
        raise TargetError(
            f"target={target!r} for {len(target.positions)} examples does not fit the output "
            f"{tuple(output.shape)}. Use SumTarget for outputs (B, L, V), with 1 or B examples."
        )
    indices = []
    for dimension, values in enumerate((target.positions, target.tokens)):
        size = output.shape[1 + dimension]
        outside = values[(values < -size) | (values >= size)]
        if len(outside):
            raise target_errors.index_out_of_range(target, dimension, int(outside[0]), output)
        indices.append((values % size).expand(batch, -1))
    return torch.stack(indices, -1)


def last_real(mask: Tensor) -> Tensor:
    """Return the position of each example's last True in a mask (B, L), or -1 without a True."""
    position = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, position, -1).amax(-1)


def require_real_target(index: Tensor | None, output: Tensor, mask: Tensor | None) -> None:
    """Raise if the target is at a padded token.

    Args:
        index: the target's indices (B, dims) or (B, n, dims), or None.
        output: the model's output; if it is (B, L, V), its positions are tokens.
        mask: True for unpadded tokens (B, L), or None.
    """
    if index is None or mask is None or output.dim() != 3 or output.shape[1] != mask.shape[1]:
        return
    positions = index[..., 0].reshape(len(mask), -1)
    if holds(mask.gather(1, positions.to(mask.device)).all()):  # on a GPU perhaps checked later
        return
    index, mask = index.cpu(), mask.cpu()
    is_real = mask.gather(1, positions.cpu())
    if index.dim() == 3:  # of several tokens, name each example's first padded one
        index = index[torch.arange(len(index)), is_real.int().argmin(1)]
    raise target_errors.padded_target(index, ~is_real.all(1), last_real(mask))


def select(output: Tensor, index: Tensor | None) -> Tensor:
    """Return the output's value (B,) at indices (B, D), or without indices its only value."""
    if index is not None:
        example = torch.arange(output.shape[0], device=output.device)
        return output[(example, *index.unbind(-1))]
    if output[0].numel() != 1:
        raise target_errors.missing_target(output)
    return output.reshape(-1)


def _index_rows(target: Any, output: Tensor) -> list[tuple[int, ...]]:
    """Convert a target to one tuple of indices per example; one for all examples is repeated."""
    # as in Captum, an int, a tuple and a tensor of one number are for all examples, a list is not
    entries = target.detach().cpu().numpy() if isinstance(target, Tensor) else target
    if isinstance(entries, np.ndarray | np.generic):
        entries = entries.item() if entries.size == 1 else entries.tolist()
    if isinstance(entries, tuple):
        return [_as_integers(entries, target, output)] * len(output)
    if not isinstance(entries, list):
        return [_as_integers((entries,), target, output)] * len(output)
    if len(entries) != len(output):
        raise target_errors.wrong_batch_size(target, len(entries), output)
    rows = (entry if isinstance(entry, tuple | list) else (entry,) for entry in entries)
    return [_as_integers(row, target, output) for row in rows]  # raises for another type


def _as_integers(values: Sequence[Any], target: Any, output: Tensor) -> tuple[int, ...]:
    """Convert indices to ints; raise for bools and other types, with ``target`` in the error."""
    indices = []
    for value in values:
        try:
            number: Any = value.item() if isinstance(value, Tensor | np.generic) else value
            index = operator.index(number)
        except (TypeError, ValueError, RuntimeError):
            raise target_errors.index_not_integer(target, value, output) from None
        if isinstance(number, bool):  # operator.index() accepts a bool
            raise target_errors.index_not_integer(target, value, output)
        indices.append(index)
    return tuple(indices)


CONTRASTS = ("mean", "others", "all", "runner-up")


def contrasted(
    output: Tensor, target: Any, contrast: Any = None, kept: Kept | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the value to explain (B,), linear in the output, and a constant part of it or None.

    Args:
        output: the model's output, (B, ..., V).
        target: the target, in one of Captum's forms.
        contrast: None for the output itself, or one of the forms of :meth:`LatimFlow.attribute`.
            ``"others"`` and ``"all"`` are made linear by treating probabilities as constants; the
            constant summand is then minus their entropy. Default: None.
        kept: the positions at which the model's head ran. Default: None, all.
    """
    arguments = (target, contrast) if kept is None else kept.among(output, target, contrast)
    value, constant = _contrast_unchecked(output, *arguments)
    if not holds(torch.isfinite(value).all()):
        example = int((~torch.isfinite(value)).nonzero()[0])
        number = float(value.detach()[example])
        raise NonFiniteError(
            f"The model's output for target={target!r} is {number} in example {example}, which "
            f"cannot be decomposed. Run the model in a wider dtype than {output.dtype}, or pass a "
            "target with a finite output."
        )
    return value, constant


def _contrast_unchecked(output: Tensor, target: Any, contrast: Any) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`contrasted` without the check for values that are NaN or infinite."""
    index = target_index(target, output)
    if contrast is not None and not isinstance(contrast, str):  # a second target
        contrast_index = second_index(contrast, output)
        return _target_value(output, target, index) - _target_value(
            output, contrast, contrast_index
        ), None
    if contrast is None:
        return _target_value(output, target, index), None
    if contrast not in CONTRASTS or index is None:
        raise OptionError(
            f"contrast={contrast!r} with target={target!r} is not accepted. Pass None or a second "
            f"target as contrast; or, if target is not None, one of {CONTRASTS}."
        )
    if contrast in ("others", "runner-up") and output.shape[-1] == 1:
        raise OptionError(
            f"contrast={contrast!r} compares with other entries, but an output of shape "
            f"{tuple(output.shape)} has one entry. Pass contrast=None."
        )
    indices = index if index.dim() == 3 else index[:, None]  # (B, n, D); a SumTarget has n > 1
    indices = indices.to(output.device)
    example = torch.arange(len(output), device=output.device)[:, None]
    all_logits = output[(example, *indices[..., :-1].unbind(-1))]  # (B, n, V)
    logits = all_logits.gather(-1, indices[..., -1:])[..., 0]
    difference, constant = _subtract_contrast(all_logits, indices[..., -1:], logits, contrast)
    if not isinstance(target, SumTarget):
        return difference[:, 0], None if constant is None else constant[:, 0]
    weights = target.weights.to(difference)
    return (difference * weights).sum(1), None if constant is None else (constant * weights).sum(1)


def _subtract_contrast(
    all_logits: Tensor, tokens: Tensor, logits: Tensor, contrast: str
) -> tuple[Tensor, Tensor | None]:
    """Subtract the contrast from the target's ``logits`` (B, n); return differences and constants.

    From a logit x_t, subtract mean(x), the largest other logit ("runner-up"), or logsumexp(x) with
    or without x_t ("all", "others"). ``all_logits`` (B, n, V) are x, ``tokens`` (B, n, 1) are t.
    """
    if contrast == "mean":
        return logits - all_logits.mean(-1), None
    scores = all_logits.detach().to(torch.promote_types(all_logits.dtype, torch.float32))
    if contrast != "all":
        scores = scores.scatter(-1, tokens, float("-inf"))
    if contrast == "runner-up":
        return logits - all_logits.gather(-1, scores.argmax(-1, keepdim=True))[..., 0], None
    # logsumexp(x) = sum of softmax * x + entropy of softmax, made linear by constant shares
    shares = torch.softmax(scores, -1)
    entropy = torch.special.entr(shares).sum(-1)
    return logits - (shares.to(all_logits) * all_logits).sum(-1) - entropy.to(all_logits), -entropy


def _target_value(output: Tensor, target: Any, index: Tensor | None) -> Tensor:
    """Return the target's value per example (B,); for a :class:`SumTarget` the weighted sum."""
    if not isinstance(target, SumTarget):
        return select(output, index)
    assert index is not None
    example = torch.arange(len(output), device=output.device)[:, None]
    logits = output[(example, *index.unbind(-1))]
    return (logits * target.weights.to(logits)).sum(1)


def second_index(contrast: Any, output: Tensor) -> Tensor | None:
    """Convert a contrast that is a second target to indices, like :func:`target_index`."""
    try:
        return target_index(contrast, output)
    except TargetError as error:
        raise TargetError(f"contrast={contrast!r} is treated as a target. {error}") from None
