"""Confusion counts of pixels' predicted and true classes, the basis of segmentation scores.

Counts add up over images, so a score can cover one image or a whole data set.

Shapes: K classes; confusion[..., i, j] counts the pixels of true class i that were given class j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..operators.kernels.arithmetic import doubled, where_double_is
from .checks import check_positive


def confusion(predicted: Tensor, gold: Tensor, classes: int, ignored: int | None = None) -> Tensor:
    """Return pixels by true and given class, for each image, (B, K, K).

    Args:
        predicted: classes 0 to K - 1, (B, ...) of integers or booleans.
        gold: true classes, of the shape of ``predicted``; pixels of class ``ignored`` do not count.
        classes: K.
        ignored: a label whose pixels do not count. Default: None, every pixel counts.

    Returns:
        (B, K, K) of integers: rows are true classes, columns given ones.

    Raises:
        InputError: when the shapes differ, or a class is not below K.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import confusion
        >>> confusion(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1]]), classes=2).tolist()
        [[[1, 1], [0, 1]]]
    """
    check_positive(classes, "classes")
    if predicted.shape != gold.shape or predicted.dim() < 2:
        raise InputError(
            f"predicted has shape {tuple(predicted.shape)} and gold {tuple(gold.shape)}; both must "
            "be (B, ...), examples first, and the same."
        )
    true = where_double_is(gold.flatten(1))
    given = predicted.flatten(1).to(true.device)
    counts = torch.ones_like(true, dtype=torch.bool) if ignored is None else true != ignored
    given, true = (
        _labels(given, counts, classes, "predicted"),
        _labels(true, counts, classes, "gold"),
    )
    found = torch.zeros(len(true), classes * classes, dtype=torch.long, device=true.device)
    found.scatter_add_(1, true * classes + given, counts.long())
    return found.view(-1, classes, classes)


def pixel_accuracy(counts: Tensor) -> Tensor:
    """Return the share of pixels given their class, (...); NaN if no pixel counts.

    Args:
        counts: (..., K, K), of :func:`confusion` or a sum over images.

    Returns:
        (...), float64: the diagonal's sum divided by the sum of all counts.

    Raises:
        InputError: when counts is not (..., K, K).

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import pixel_accuracy
        >>> pixel_accuracy(torch.tensor([[3, 1], [0, 4]])).item()
        0.875
    """
    counts = doubled(counts)
    return _diagonal(counts).sum(-1) / counts.sum((-2, -1))


def iou(counts: Tensor) -> Tensor:
    """Return intersection over union by class, (..., K); NaN for a class neither true nor given.

    ::

        IoU = TP / (TP + FP + FN)

    Args:
        counts: (..., K, K), as for :func:`pixel_accuracy`.

    Returns:
        (..., K), float64.

    Raises:
        InputError: when counts is not (..., K, K).

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import iou
        >>> iou(torch.tensor([[3, 1], [0, 4]])).tolist()
        [0.75, 0.8]
    """
    counts = doubled(counts)
    both = _diagonal(counts)
    return both / (counts.sum(-1) + counts.sum(-2) - both)


def mean_iou(counts: Tensor) -> Tensor:
    """Return the mean of :func:`iou` over the classes that are true or given anywhere, (...).

    Args:
        counts: (..., K, K), as for :func:`pixel_accuracy`.

    Returns:
        (...), float64; NaN if no pixel counts.

    Raises:
        InputError: when counts is not (..., K, K).

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import mean_iou
        >>> mean_iou(torch.tensor([[1, 0, 0], [1, 2, 0], [0, 0, 0]])).round(decimals=2).item()
        0.58
    """
    return iou(counts).nanmean(-1)


def f1(counts: Tensor) -> Tensor:
    """Return 2 TP / (2 TP + FP + FN) by class, (..., K); NaN for a class neither true nor given.

    Args:
        counts: (..., K, K), as for :func:`pixel_accuracy`.

    Returns:
        (..., K), float64.

    Raises:
        InputError: when counts is not (..., K, K).

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import f1
        >>> f1(torch.tensor([[2, 1], [1, 6]])).round(decimals=2).tolist()
        [0.67, 0.86]
    """
    counts = doubled(counts)
    return 2 * _diagonal(counts) / (counts.sum(-1) + counts.sum(-2))


def _diagonal(counts: Tensor) -> Tensor:
    if counts.dim() < 2 or counts.shape[-1] != counts.shape[-2]:
        raise InputError(f"counts has shape {tuple(counts.shape)}; (..., K, K) is needed.")
    return counts.diagonal(dim1=-2, dim2=-1)


def _labels(labels: Tensor, counts: Tensor, classes: int, name: str) -> Tensor:
    """Return labels as integers, 0 at pixels that do not count."""
    if labels.is_floating_point():
        raise InputError(f"{name} is of dtype {labels.dtype}; classes are integers or booleans.")
    labels = labels.long().where(counts, 0)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(
            f"{name} holds classes {int(labels.min())} to {int(labels.max())}, but classes="
            f"{classes} allows 0 to {classes - 1}. Is there a class to be ignored?"
        )
    return labels
