"""Compute a model's class scores before and after changes of the input."""

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

#: A function from changed inputs (R, ...) to logits of classes (R, K).
Classifier = Callable[[Tensor], Any]


class Perturbed(NamedTuple):
    """Curves of a class's scores for changed inputs, with one value per example and share.

    Attributes:
        correct: 1 if the class is still the most likely one, else 0.
        probability: the probability of the class, after a softmax.
        logit: the logit of the class.
    """

    correct: Curve
    probability: Curve
    logit: Curve


def class_logits(forward_func: Classifier, inputs: Tensor) -> Tensor:
    """Return a model's logits (R, K) for a batch; for a language model, at the last token."""
    with torch.no_grad():
        logits = logits_of(call_model(forward_func, inputs, ()))
    if logits.dim() == 3:
        logits = logits[:, -1]
    logits = as_scores(logits, "the model's output", dims=2)
    if len(logits) != len(inputs):
        raise InputError(
            f"forward_func returned {len(logits)} rows of logits for {len(inputs)} inputs. Return "
            "one row for each input."
        )
    return logits


def class_targets(target: Any, logits: Tensor) -> Tensor:
    """Return the class index of each example in a tensor (B,).

    Args:
        target: one class, a list or tensor of one class per example, or None for the predictions.
        logits: the model's logits for the unchanged inputs, (B, K).
    """
    batch, classes = logits.shape
    if target is None:
        return logits.argmax(-1)
    try:
        index = torch.as_tensor(target, device=logits.device)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(0)  # refused below, because it is floating-point
    if index.is_floating_point() or index.dim() > 1 or (index.dim() == 1 and len(index) != batch):
        raise TargetError(
            f"target={target!r}: pass a class, or one class for each of the {batch} examples, or "
            "None for the model's predictions."
        )
    if not bool(((index >= 0) & (index < classes)).all()):
        raise TargetError(
            f"target={target!r} is not a class of the model. Pass classes from 0 to {classes - 1}."
        )
    return index.long().expand(batch)


def curves(logits: Tensor, target: Tensor, fractions: Tensor) -> Perturbed:
    """Return the curves of each example's target class, from logits (B, F, K) at F shares."""
    target_index = target[:, None, None].expand(*logits.shape[:2], 1)
    # the fields of Perturbed: correct, probability, logit
    measures = [logits.argmax(-1) == target[:, None]]
    measures += [x.gather(-1, target_index)[..., 0] for x in (logits.double().softmax(-1), logits)]
    return Perturbed(*(Curve(fractions, values.double()) for values in measures))
