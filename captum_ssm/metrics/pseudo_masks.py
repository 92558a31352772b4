"""Evaluate relevance maps as masks for weakly supervised segmentation (UN table 6, appendix B).

An image has a relevance map for each class that occurs in the image. Together the maps predict each
pixel's class. The table contains each class's IoU over the pixels of all images, and their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import as_flags, as_scores, check_positive
from .confusion import confusion, iou
from .sample import Interval, Sample


def pseudo_masks(maps: Tensor, present: Tensor, background: float = 0.5) -> Tensor:
    """Return a class (B, H, W) for each pixel: 0 for background, or k + 1 for map k.

    Negative values of each present class's map are set to 0, and the map is divided by its maximum.
    A pixel gets the class of the map with the highest value (the first of equal maps), or
    background if no map is above ``background``.

    Args:
        maps: a relevance map for each class, (B, K, H, W).
        present: True for the classes in each image, (B, K).
        background: the threshold, from 0 to 1. The paper does not report a value. Default: 0.5.

    Raises:
        InputError: when maps is not (B, K, H, W), or present is not (B, K).
        OptionError: when background is not from 0 to 1.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import pseudo_masks
        >>> maps = torch.tensor([[[[4.0, 1.0, 0.0]], [[0.0, 1.0, 3.0]]]])
        >>> pseudo_masks(maps, present=torch.tensor([[1, 1]])).tolist()
        [[[1, 0, 2]]]
    """
    scores = as_scores(maps, "maps", dims=4)
    is_present = as_flags(present, scores[:, :, 0, 0], "present")
    if not 0 <= background <= 1:
        raise OptionError(f"background={background}: pass a number from 0 to 1.")
    positive = scores.clamp_min(0) * is_present[..., None, None]
    peak = positive.amax((2, 3), keepdim=True)
    positive = positive / peak.where(peak > 0, 1)  # a map without positive values stays 0
    highest, index = positive.max(1)
    return (index + 1).where(highest > background, 0)


class PseudoMaskScores:
    """Compute the IoU of each class over the images of several batches.

    Args:
        classes: the number K of classes, including background; 21 for Pascal VOC. Default: 21.
        ignored: a label whose pixels are not counted. Default: 255, the outlines in Pascal VOC.

    Raises:
        InputError: when the shapes of masks and gold differ, a class is not below K, scores are
            read before the first image, or the options of merged scores differ.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import PseudoMaskScores
        >>> scores = PseudoMaskScores(classes=2)
        >>> scores.update(torch.tensor([[[0, 1, 1, 0]]]), gold=torch.tensor([[[0, 0, 1, 255]]]))
        >>> scores.compute().tolist()  # background, class 1, their mean
        [0.5, 0.5, 0.5]
    """

    def __init__(self, classes: int = 21, ignored: int | None = 255) -> None:
        check_positive(classes, "classes")
        self.classes, self.ignored = classes, ignored
        self._sample = Sample(_ious_and_mean)

    def update(self, masks: Tensor, gold: Tensor) -> None:
        """Add a batch of images.

        Args:
            masks: a class for each pixel, (B, H, W), for example from :func:`pseudo_masks`.
            gold: the true classes, (B, H, W).
        """
        counts = confusion(masks, gold, self.classes, self.ignored)
        self._sample.update(counts.flatten(1).double())

    def merge(self, other: PseudoMaskScores) -> None:
        """Add the images of another :class:`PseudoMaskScores` with the same options."""
        if (self.classes, self.ignored) != (other.classes, other.ignored):
            raise InputError(
                f"other has classes={other.classes} and ignored={other.ignored}, but these scores "
                f"have {self.classes} and {self.ignored}. Merge scores with equal options."
            )
        self._sample.merge(other._sample)

    def compute(self) -> Tensor:
        """Return the IoU of each class, followed by their mean, in a tensor (K + 1,).

        The IoU of a class without true or predicted pixels is NaN, and the mean ignores it.
        """
        return self._sample.value()

    def interval(
        self, confidence: float = 0.95, *, resamples: int = 1000, seed: int = 0
    ) -> Interval:
        """Return confidence bounds, see :meth:`~captum_ssm.metrics.Sample.interval`."""
        return self._sample.interval(confidence, resamples=resamples, seed=seed)


def _ious_and_mean(sums: Tensor, counts: Tensor) -> Tensor:
    """Compute the K IoUs and the mean IoU from sums of counts (..., K * K) over images."""
    classes = round(sums.shape[-1] ** 0.5)
    ious = iou(sums.reshape(*sums.shape[:-1], classes, classes))
    return torch.cat([ious, ious.nanmean(-1, keepdim=True)], -1)
