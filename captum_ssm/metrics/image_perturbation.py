"""Measure a class while relevant pixels of an image are removed (HA table 1, UN table 1).

In the positive test, the most relevant pixels are removed first. A lower area under the curve is
better, since accuracy should fall quickly. In the negative test, the least relevant pixels are
removed first, and a higher area is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attr.call.inputs import batch_parts
from ..errors import InputError
from .checks import as_fractions, as_scores
from .classes import Classifier, Perturbed, class_logits, class_targets, curves
from .curve import TENTHS, change_order, changed_at_shares
from .fills import Fill, filled


def pixel_relevance(relevance: Tensor, size: tuple[int, int]) -> Tensor:
    """Convert the relevance of images or patches to one number per pixel (B, H, W).

    Args:
        relevance: relevance of images (B, C, H, W), which is summed over channels, or a map (B, h,
            w), for example of patches, which is resized bilinearly as in the published code.
        size: the height H and width W of the images.

    Raises:
        InputError: when relevance is neither (B, C, H, W) nor (B, h, w).
        NonFiniteError: when relevance contains NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import pixel_relevance
        >>> pixel_relevance(torch.tensor([[[0.0, 1.0]]]), size=(1, 4)).tolist()
        [[[0.0, 0.25, 0.75, 1.0]]]
    """
    scores = as_scores(relevance, "relevance")
    if scores.dim() not in (3, 4):
        raise InputError(
            f"relevance has shape {tuple(scores.shape)}. Pass (B, C, H, W) or a map (B, h, w)."
        )
    maps = scores.sum(1) if scores.dim() == 4 else scores
    if tuple(maps.shape[1:]) == tuple(size):
        return maps
    return F.interpolate(maps[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def image_perturbation(
    forward_func: Classifier,
    images: Tensor,
    relevance: Tensor,
    target: Any = None,
    *,
    most_first: bool = True,
    fractions: Sequence[float] = TENTHS,
    fill: Fill = 0.0,
    generator: torch.Generator | None = None,
    internal_batch_size: int | None = None,
) -> Perturbed:
    """Measure a class's scores while pixels are removed in the order of their relevance.

    The published score is the mean of ``image_perturbation(...).correct.area()``, in percent.

    Args:
        forward_func: a function from images (B, C, H, W) to logits (B, K).
        images: the images as passed to the model, (B, C, H, W).
        relevance: relevance of images or maps, see :func:`pixel_relevance`.
        target: the class, or one class per image. Default: None, the model's predictions.
        most_first: True to remove the most relevant pixels first (positive test), False to remove
            the least relevant first (negative test). Default: True.
        fractions: shares of the pixels that are removed. Default: 10 % to 90 %.
        fill: the value of removed pixels, see :func:`~captum_ssm.metrics.fills.filled`. The
            published code uses black, which is 0 before normalization and
            :func:`~captum_ssm.metrics.black` after normalization. Default: 0.
        generator: a generator for a random order of pixels with equal relevance. Default: None,
            such pixels are removed row by row from the top left.
        internal_batch_size: the largest number of images to run at a time. Default: None, all.

    Returns:
        Curves, one row per image. At share f, the first floor(f N) of N pixels are removed.

    Raises:
        InputError: when the shapes of images, relevance and fill do not fit.
        OptionError: when fractions do not increase from 0 to 1, or the name of a fill is unknown.
        TargetError: when target is not a class of the model.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import image_perturbation
        >>> model = lambda x: torch.stack([x.sum((1, 2, 3)), torch.ones(len(x))], 1)  # sum, 1
        >>> relevance = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
        >>> found = image_perturbation(
        ...     model, torch.ones(1, 1, 1, 4), relevance, fractions=[0.25, 0.5, 1])
        >>> found.logit.values.tolist(), found.correct.values.tolist()
        ([[3.0, 2.0, 0.0]], [[1.0, 1.0, 0.0]])
    """
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        actual = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise InputError(f"images is {actual}. Pass a floating-point tensor (B, C, H, W).")
    shares = as_fractions(fractions)
    maps = pixel_relevance(relevance, (images.shape[2], images.shape[3]))
    if len(maps) != len(images):
        raise InputError(
            f"relevance has {len(maps)} maps for {len(images)} images. Pass one map per image."
        )
    order = change_order(maps.flatten(1), most_first=most_first, generator=generator)
    logits, unchanged = [], []
    for take_batch in batch_parts(len(images), internal_batch_size):
        batch = take_batch(images)
        # only images are split with the batch: values per channel (C,) may have the same length
        per_image = isinstance(fill, Tensor) and fill.dim() == 4
        replacement = filled(batch, take_batch(fill) if per_image else fill)
        removed = changed_at_shares(take_batch(order), shares).to(images.device)
        removed = removed.view(len(batch), -1, *images.shape[2:])  # (B, F, H, W)
        unchanged.append(class_logits(forward_func, batch))
        steps = (torch.where(mask[:, None], replacement, batch) for mask in removed.unbind(1))
        logits.append(torch.stack([class_logits(forward_func, x) for x in steps], 1))
    return curves(torch.cat(logits), class_targets(target, torch.cat(unchanged)), shares)
