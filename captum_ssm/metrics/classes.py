"""A model's class scores, before and after changes of its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attr.call.inputs import call_model
from ..attr.call.targets import logits_of
from ..errors import InputError, TargetError
from .checks import as_scores
from .curve import Curve

#: Changed inputs (R, ...) in, logits over classes (R, K) out.
Classifier = Callable[[Tensor], Any]


class Perturbed(NamedTuple):
    """Effects of changed inputs on a class: curves of a value per example and share.

    Attributes:
        correct: 1 if the class is still the most likely one, else 0.
        probability: of the class, after a softmax.
        logit: of the class.
    """

    correct: Curve
    probability: Curve
    logit: Curve


def class_logits(forward_func: Classifier, inputs: Tensor) -> Tensor:
    """Return the logits (R, K) of a batch; of a language model, those at the last token."""
    with torch.no_grad():
        logits = logits_of(call_model(forward_func, inputs, ()))
    if logits.dim() == 3:
        logits = logits[:, -1]
    logits = as_scores(logits, "the model's output", dims=2)
    if len(logits) != len(inputs):
        raise InputError(
            f"forward_func returned {len(logits)} rows of logits for {len(inputs)} inputs: it must "
            "return one row for each."
        )
    return logits


def class_targets(target: Any, logits: Tensor) -> Tensor:
    """Return the class of each example, (B,).

    Args:
        target: an int, a list or tensor of one per example, or None for the model's prediction.
        logits: of the unchanged inputs, (B, K).
    """
    batch, classes = logits.shape
    if target is None:
        return logits.argmax(-1)
    try:
        found = torch.as_tensor(target, device=logits.device)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.is_floating_point() or found.dim() > 1 or (found.dim() == 1 and len(found) != batch):
        raise TargetError(
            f"target={target!r}: pass a class, or one class for each of the {batch} examples, or "
            "None for the model's predictions."
        )
    if not bool(((found >= 0) & (found < classes)).all()):
        raise TargetError(f"target={target!r}: the model has classes 0 to {classes - 1}.")
    return found.long().expand(batch)


def curves(logits: Tensor, target: Tensor, fractions: Tensor) -> Perturbed:
    """Return curves of each example's class (B,) from logits (B, F, K)."""
    index = target[:, None, None].expand(*logits.shape[:2], 1)
    chosen = [logits.argmax(-1) == target[:, None]]
    chosen += [x.gather(-1, index)[..., 0] for x in (logits.double().softmax(-1), logits)]
    return Perturbed(*(Curve(fractions, values.double()) for values in chosen))
