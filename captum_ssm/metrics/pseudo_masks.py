"""Weakly supervised segmentation: relevance maps as pseudo-masks (UN table 6, appendix B).

Labels name the classes of an image; the maps of these classes locate them. The table's numbers are
the IoU of each class and their mean, over the pixels of all images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import as_flags, as_scores, check_positive
from .confusion import confusion, iou
from .sample import Interval, Sample


def pseudo_masks(maps: Tensor, present: Tensor, background: float = 0.5) -> Tensor:
    """Return a class for each pixel, 0 for background and k + 1 for the k-th map, (B, H, W).

    Each present class's map is cut at 0 and divided by its maximum. A pixel takes the class of the
    highest map, the first of equal maps, or background if no map is above ``background``.

    Args:
        maps: relevance for each class, (B, K, H, W).
        present: the classes shown in each image, (B, K).
        background: the background's score, from 0 to 1. The paper gives none. Default: 0.5.

    Returns:
        (B, H, W) of integers.

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
    shown = as_flags(present, scores[:, :, 0, 0], "present")
    if not 0 <= background <= 1:
        raise OptionError(f"background={background}: use a number from 0 to 1.")
    positive = scores.clamp_min(0) * shown[..., None, None]
    peak = positive.amax((2, 3), keepdim=True)
    positive = positive / peak.where(peak > 0, 1)
    best, index = positive.max(1)
    return (index + 1).where(best > background, 0)


class PseudoMaskScores:
    """Gathers the IoU of each class over batches of images.

    Args:
        classes: K, the background among them; 21 for Pascal VOC. Default: 21.
        ignored: a label whose pixels do not count. Default: 255, VOC's outlines.

    Raises:
        InputError: when masks and gold differ in shape or hold a class not below K, before the
            first image, or when merged scores have other options.

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
        self._sample = Sample(_ious)

    def update(self, masks: Tensor, gold: Tensor) -> None:
        """Add images.

        Args:
            masks: a class for each pixel, (B, H, W), as of :func:`pseudo_masks`.
            gold: the true classes, (B, H, W).
        """
        counts = confusion(masks, gold, self.classes, self.ignored)
        self._sample.update(counts.flatten(1).double())

    def merge(self, other: PseudoMaskScores) -> None:
        """Add the images of another :class:`PseudoMaskScores` with the same options."""
        if (self.classes, self.ignored) != (other.classes, other.ignored):
            raise InputError("other has other classes or ignores another label; they cannot merge.")
        self._sample.merge(other._sample)

    def compute(self) -> Tensor:
        """Return the IoU of each class, then their mean, (K + 1,).

        A class neither true nor given anywhere is NaN and left out of the mean.
        """
        return self._sample.value()

    def interval(
        self, confidence: float = 0.95, *, resamples: int = 1000, seed: int = 0
    ) -> Interval:
        """Return bounds of the scores, as :meth:`~captum_ssm.metrics.Sample.interval`."""
        return self._sample.interval(confidence, resamples=resamples, seed=seed)


def _ious(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the K IoUs and the mean IoU of counts (..., K * K) summed over images."""
    size = round(sums.shape[-1] ** 0.5)
    found = iou(sums.reshape(*sums.shape[:-1], size, size))
    return torch.cat([found, found.nanmean(-1, keepdim=True)], -1)
