"""Evaluate relevance maps as segmentations of an object (HA table 2, UN tables 3 and 4).

A map is scaled to [0, 1]; pixels above the map's mean are foreground. As in the authors' code,
pixel accuracy and mIoU are computed over the pixels of all images. mAP and mF1 are means over
images of the average precision and of the foreground's F1. For mAP, the authors' code ranks the
scores of both classes in one list: ``ranking="together"``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import as_scores
from .confusion import confusion, f1, mean_iou, pixel_accuracy
from .ranking import average_precision
from .sample import Interval, Sample


def unit_range(maps: Tensor) -> Tensor:
    """Return each map scaled to [0, 1]; a constant map becomes 0.

    ::

        (m - min m) / (max m - min m)

    Args:
        maps: one map per example, (B, ...).

    Raises:
        InputError: when maps has only one dimension.
        NonFiniteError: when maps contains NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import unit_range
        >>> unit_range(torch.tensor([[-2.0, 0.0, 2.0], [5.0, 5.0, 5.0]])).tolist()
        [[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]]
    """
    maps = as_scores(maps, "maps")
    if maps.dim() < 2:
        raise InputError(f"maps has shape {tuple(maps.shape)}. Pass (B, ...), examples first.")
    flat = maps.flatten(1)
    low, high = flat.min(1, keepdim=True).values, flat.max(1, keepdim=True).values
    width = (high - low).where(high > low, 1)
    return ((flat - low) / width).view(maps.shape)


def foreground(maps: Tensor, threshold: str | float = "mean") -> Tensor:
    """Return a mask (B, H, W) of the pixels that a map predicts as the object.

    Args:
        maps: the relevance of each pixel, (B, H, W).
        threshold: ``"mean"`` for the mean of each scaled map, or a number from 0 to 1. Pixels above
            the threshold are foreground, so a constant map has no foreground. Default: ``"mean"``.

    Raises:
        OptionError: when threshold is neither ``"mean"`` nor from 0 to 1.
        NonFiniteError: when maps contains NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import foreground
        >>> foreground(torch.tensor([[[1.0, 2.0, 6.0]]])).tolist()
        [[[False, False, True]]]
        >>> foreground(torch.tensor([[[1.0, 2.0, 6.0]]]), threshold=0.1).tolist()
        [[[False, True, True]]]
    """
    scaled = unit_range(maps)
    if isinstance(threshold, str):
        if threshold != "mean":
            raise OptionError(f"threshold={threshold!r}: pass 'mean' or a number from 0 to 1.")
        return scaled > scaled.flatten(1).mean(1).view(-1, *[1] * (maps.dim() - 1))
    if not 0 <= threshold <= 1:
        raise OptionError(f"threshold={threshold}: pass 'mean' or a number from 0 to 1.")
    return scaled > threshold


#: How to rank the scores of pixels; see :func:`segmentation_average_precision`.
RANKINGS = ("classes", "together", "unscaled")


def segmentation_average_precision(
    maps: Tensor, gold: Tensor, ignored: int | None = -1, ranking: str = "classes"
) -> Tensor:
    """Return the mean of the average precisions of foreground and background.

    Args:
        maps: the relevance of each pixel, (B, H, W).
        gold: 1 for the object, 0 for background, (B, H, W).
        ignored: a label whose pixels are ignored. Default: -1.
        ranking: ``"classes"`` ranks the pixels for each class separately and returns the mean.
            ``"together"`` ranks the scaled map and 1 minus the scaled map in one list, as in the
            authors' code; a map that is low nearly everywhere then has a high score. ``"unscaled"``
            does the same without scaling, as in the unified paper's script. Default: ``"classes"``.

    Returns:
        Average precisions (B,), of only one class if the image lacks the other; NaN if all pixels
        are ignored.

    Raises:
        InputError: when the shapes differ, or gold has an entry other than 0, 1 and ``ignored``.
        OptionError: when ranking is unknown.
        NonFiniteError: when maps contains NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import segmentation_average_precision
        >>> maps, gold = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]), torch.tensor([[[1, 0]]] * 2)
        >>> segmentation_average_precision(maps, gold).tolist()
        [1.0, 0.5]
    """
    _check_ranking(ranking)
    used, true = _used_and_object(maps, gold, ignored)
    scores = (as_scores(maps, "maps") if ranking == "unscaled" else unit_range(maps)).flatten(1)
    if ranking == "classes":
        by_class = [average_precision(scores, true, used), average_precision(-scores, ~true, used)]
        return torch.stack(by_class).nanmean(0)
    # one list with the scores of both classes
    pairs = ((scores, 1 - scores), (true, ~true), (used, used))
    return average_precision(*(torch.cat(pair, 1) for pair in pairs))


def _check_ranking(ranking: str) -> None:
    if ranking not in RANKINGS:
        raise OptionError(f"ranking={ranking!r} is unknown. Pass one of {RANKINGS}.")


class Segmentation(NamedTuple):
    """The four scores of the published tables, as numbers from 0 to 1.

    Attributes:
        pixel_accuracy: the share of right pixels among the pixels of all images.
        mean_iou: the mean IoU of background and foreground over the pixels of all images.
        mean_ap: the mean over images of :func:`segmentation_average_precision`.
        mean_f1: the mean over images of the foreground's F1.
    """

    pixel_accuracy: float
    mean_iou: float
    mean_ap: float
    mean_f1: float


class SegmentationScores:
    """Compute :class:`Segmentation` for the images of several batches.

    Args:
        threshold: the threshold of foreground pixels, see :func:`foreground`. Default: ``"mean"``.
        ignored: a label whose pixels are ignored. Default: -1.
        ranking: the ranking of pixels for the average precision, see
            :func:`segmentation_average_precision`; ``"together"`` as in the published tables.
            Default: ``"classes"``.

    Raises:
        InputError: when maps and gold differ in shape or gold has an entry other than 0, 1 and
            ``ignored``; before the first image; or when merged scores have different options.
        OptionError: when threshold is neither ``"mean"`` nor from 0 to 1, or ranking is unknown.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import SegmentationScores
        >>> scores = SegmentationScores()
        >>> scores.update(torch.tensor([[[0.9, 0.1]]]), torch.tensor([[[1, 0]]]))
        >>> scores.compute()
        Segmentation(pixel_accuracy=1.0, mean_iou=1.0, mean_ap=1.0, mean_f1=1.0)
    """

    def __init__(
        self, threshold: str | float = "mean", ignored: int | None = -1, ranking: str = "classes"
    ) -> None:
        _check_ranking(ranking)
        self.threshold, self.ignored, self.ranking = threshold, ignored, ranking
        self._sample = Sample(_scores_of_sums)

    def update(self, maps: Tensor, gold: Tensor) -> None:
        """Add a batch of images.

        Args:
            maps: relevance of each pixel, (B, H, W); see
                :func:`~captum_ssm.metrics.pixel_relevance`.
            gold: 1 for the object, 0 for background, (B, H, W).
        """
        used = _used_and_object(maps, gold, self.ignored)[0].view(gold.shape)
        predicted = foreground(maps, self.threshold).to(gold.device)
        pixels = confusion(predicted, gold.long().where(used, -1), 2, ignored=-1)
        precision = segmentation_average_precision(maps, gold, self.ignored, self.ranking)
        precision = precision.to(pixels.device)
        columns = [pixels.flatten(1).double(), precision[:, None], f1(pixels)[:, 1:]]
        self._sample.update(torch.cat(columns, 1))

    def merge(self, other: SegmentationScores) -> None:
        """Add the images of another :class:`SegmentationScores` with the same options."""
        if self._options() != other._options():
            raise InputError(
                f"other has (threshold, ignored, ranking) = {other._options()}, but these scores "
                f"have {self._options()}. Merge scores with equal options."
            )
        self._sample.merge(other._sample)

    def _options(self) -> tuple[str | float, int | None, str]:
        return self.threshold, self.ignored, self.ranking

    def compute(self) -> Segmentation:
        """Return the scores of all images."""
        return Segmentation(*self._sample.value().tolist())

    def interval(
        self, confidence: float = 0.95, *, resamples: int = 1000, seed: int = 0
    ) -> Interval:
        """Return confidence bounds, see :meth:`~captum_ssm.metrics.Sample.interval`."""
        return self._sample.interval(confidence, resamples=resamples, seed=seed)


def _scores_of_sums(sums: Tensor, counts: Tensor) -> Tensor:
    """Compute the four scores (..., 4) from sums (..., 6) of counts, average precision and F1."""
    pixels = sums[..., :4].reshape(*sums.shape[:-1], 2, 2)
    means = sums[..., 4:] / counts[..., 4:]
    return torch.cat([torch.stack([pixel_accuracy(pixels), mean_iou(pixels)], -1), means], -1)


def _used_and_object(maps: Tensor, gold: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Return masks (B, N) of the pixels that are not ignored, and of the object's pixels."""
    if maps.shape != gold.shape or gold.dim() < 2:
        raise InputError(
            f"maps has shape {tuple(maps.shape)}, but gold has {tuple(gold.shape)}. Pass one label "
            "per pixel, examples first; resize maps with pixel_relevance()."
        )
    flat = gold.flatten(1)
    used = torch.ones_like(flat, dtype=torch.bool) if ignored is None else flat != ignored
    if not bool(((flat == 0) | (flat == 1) | ~used).all()):
        raise InputError(
            f"gold has the labels {torch.unique(flat).tolist()[:9]}. Pass only 0, 1 and ignored="
            f"{ignored}."
        )
    return used, flat == 1
