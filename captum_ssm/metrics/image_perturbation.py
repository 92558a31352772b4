"""Image perturbation: pixels are removed in the order of their relevance (HA table 1, UN table 1).

Most relevant first (the positive test), a lower area is better, since accuracy should fall quickly.
Least relevant first (the negative test), a higher area is better.
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
from .curve import TENTHS, change_order, changed
from .fills import Fill, filled


def pixel_relevance(relevance: Tensor, size: tuple[int, int]) -> Tensor:
    """Return one number per pixel, (B, H, W).

    Args:
        relevance: of images (B, C, H, W), summed over channels, or a map (B, h, w), for example of
            patches, resized bilinearly as in published code.
        size: H and W.

    Returns:
        (B, H, W).

    Raises:
        InputError: when relevance is neither (B, C, H, W) nor (B, h, w).
        NonFiniteError: when relevance holds NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import pixel_relevance
        >>> pixel_relevance(torch.tensor([[[0.0, 1.0]]]), size=(1, 4)).tolist()
        [[[0.0, 0.25, 0.75, 1.0]]]
    """
    scores = as_scores(relevance, "relevance")
    if scores.dim() not in (3, 4):
        raise InputError(
            f"relevance has shape {tuple(scores.shape)}; (B, C, H, W) or a map (B, h, w) is needed."
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
    """Measure a class while pixels are removed in the order of their relevance.

    The published score is ``image_perturbation(...).correct.area()``, the mean over examples in
    percent.

    Args:
        forward_func: images (B, C, H, W) in, logits (B, K) out.
        images: as the model takes them, (B, C, H, W).
        relevance: see :func:`pixel_relevance`.
        target: the class, or one per image. Default: None, the model's prediction for each whole
            image.
        most_first: remove the most relevant pixels first (positive), or the least (negative).
            Default: True.
        fractions: shares of the pixels that are removed. Default: 10 % to 90 %.
        fill: the replacement of removed pixels, see :func:`~captum_ssm.metrics.fills.filled`; the
            published code's black is 0 before normalization, :func:`~captum_ssm.metrics.black`
            after it. Default: 0.
        generator: breaks ties of relevance at random. Default: None, pixels further up and left
            are removed first.
        internal_batch_size: run at most so many images at a time. Default: None, all.

    Returns:
        Curves over ``fractions``, one row per image: of N pixels, the share f removes the first
        floor(f N).

    Raises:
        InputError: when the shapes of images, relevance and fill do not fit.
        OptionError: when fractions do not rise within 0 to 1, or a named fill is unknown.
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
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise InputError(f"images must be a floating tensor (B, C, H, W), got {found}.")
    shares = as_fractions(fractions)
    maps = pixel_relevance(relevance, (images.shape[2], images.shape[3]))
    if len(maps) != len(images):
        raise InputError(f"relevance has {len(maps)} maps for {len(images)} images.")
    order = change_order(maps.flatten(1), most_first=most_first, generator=generator)
    parts, whole = [], []
    for cut in batch_parts(len(images), internal_batch_size):
        some = cut(images)
        # a value per channel may be as long as the batch
        per_image = isinstance(fill, Tensor) and fill.dim() == 4
        replacement = filled(some, cut(fill) if per_image else fill)
        removed = changed(cut(order), shares).to(images.device)
        removed = removed.view(len(some), -1, *images.shape[2:])  # (B, F, H, W)
        whole.append(class_logits(forward_func, some))
        steps = (torch.where(gone[:, None], replacement, some) for gone in removed.unbind(1))
        parts.append(torch.stack([class_logits(forward_func, step) for step in steps], 1))
    return curves(torch.cat(parts), class_targets(target, torch.cat(whole)), shares)
