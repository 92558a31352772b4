"""Count pixels by true and predicted class, and compute segmentation scores from the counts.

Sum the counts over images to compute a score of a whole data set.

Shapes: K classes; confusion[..., i, j] counts pixels of true class i and predicted class j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..operators.kernels.arithmetic import doubled, where_double_is
from .checks import check_positive


def confusion(predicted: Tensor, gold: Tensor, classes: int, ignored: int | None = None) -> Tensor:
    """Count the pixels of each image by true and predicted class.

    Args:
        predicted: predicted classes 0 to K - 1, integers or booleans (B, ...).
        gold: true classes, in the shape of ``predicted``.
        classes: the number K of classes.
        ignored: a label in ``gold`` whose pixels are not counted. Default: None.

    Returns:
        Integers (B, K, K); rows are true classes, and columns are predicted classes.

    Raises:
        InputError: when the shapes differ, or a class is not from 0 to K - 1.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import confusion
        >>> confusion(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1]]), classes=2).tolist()
        [[[1, 1], [0, 1]]]
    """
    check_positive(classes, "classes")
    if predicted.shape != gold.shape or predicted.dim() < 2:
        raise InputError(
            f"predicted has shape {tuple(predicted.shape)} and gold {tuple(gold.shape)}. Pass "
            "tensors of the same shape (B, ...), examples first."
        )
    true = where_double_is(gold.flatten(1))
    predicted = predicted.flatten(1).to(true.device)
    labeled = torch.ones_like(true, dtype=torch.bool) if ignored is None else true != ignored
    predicted, true = (
        _check_labels(predicted, labeled, classes, "predicted"),
        _check_labels(true, labeled, classes, "gold"),
    )
    counts = torch.zeros(len(true), classes * classes, dtype=torch.long, device=true.device)
    counts.scatter_add_(1, true * classes + predicted, labeled.long())
    return counts.view(-1, classes, classes)


def pixel_accuracy(counts: Tensor) -> Tensor:
    """Return the share of pixels with the right class.

    Args:
        counts: the result of :func:`confusion`, or a sum of it over images, (..., K, K).

    Returns:
        Shares (...), float64: the diagonal's sum divided by the total; NaN if there are no pixels.

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
    """Return the intersection over union (IoU) of each class.

    ::

        IoU = TP / (TP + FP + FN)

    Args:
        counts: the result of :func:`confusion`, or a sum of it over images, (..., K, K).

    Returns:
        Scores (..., K), float64; NaN if no pixel has this true or predicted class.

    Raises:
        InputError: when counts is not (..., K, K).

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import iou
        >>> iou(torch.tensor([[3, 1], [0, 4]])).tolist()
        [0.75, 0.8]
    """
    counts = doubled(counts)
    right = _diagonal(counts)
    return right / (counts.sum(-1) + counts.sum(-2) - right)


def mean_iou(counts: Tensor) -> Tensor:
    """Return the mean of :func:`iou` over the classes that occur as true or predicted class.

    Args:
        counts: the result of :func:`confusion`, or a sum of it over images, (..., K, K).

    Returns:
        Means (...), float64; NaN if no pixel was counted.

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
    """Return the F1 score of each class: 2 TP / (2 TP + FP + FN).

    Args:
        counts: the result of :func:`confusion`, or a sum of it over images, (..., K, K).

    Returns:
        Scores (..., K), float64; NaN if no pixel has this true or predicted class.

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
    """Return the number of right pixels of each class (..., K); raise unless counts is square."""
    if counts.dim() < 2 or counts.shape[-1] != counts.shape[-2]:
        raise InputError(f"counts has shape {tuple(counts.shape)}. Pass a tensor (..., K, K).")
    return counts.diagonal(dim1=-2, dim2=-1)


def _check_labels(labels: Tensor, labeled: Tensor, classes: int, name: str) -> Tensor:
    """Return labels as integers, with 0 at unlabeled pixels; raise if a label is not a class."""
    if labels.is_floating_point():
        raise InputError(f"{name} has dtype {labels.dtype}. Pass classes as integers or booleans.")
    labels = labels.long().where(labeled, 0)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(
            f"{name} has classes {int(labels.min())} to {int(labels.max())}, but classes={classes} "
            f"allows 0 to {classes - 1}. Pass more classes, or a label to ignore as ignored=."
        )
    return labels
