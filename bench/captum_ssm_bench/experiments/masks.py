"""Relevance as a guess at where objects are: one object, or several of different classes.

Shapes: K classes, the background among them; H and W pixels down and across.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from captum_ssm.metrics import (
    confusion,
    f1,
    foreground,
    pixel_relevance,
    pseudo_masks,
    segmentation_average_precision,
)

from ..harness.experiment import Cell, Column
from ..harness.records import Numbers, Rows
from ..tasks.scenes import SCENES, SceneBatch, SceneTask
from .image_baselines import Explain
from .image_maps import ImageMap, image_maps
from .on_scenes import VIM, VIT, VMAMBA, ByMaps, predicted

BACKGROUND, OBJECT = "background", "object"
#: The background's scores; the papers give none.
BACKGROUND_SCORES = (0.25, 0.5, 0.75)


def counts_of(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the numbers of some classes, three for each; see :func:`pixel_counts`."""
    return tuple(f"{what} {name}" for name in names for what in ("right", "true", "given"))


def pixel_counts(given: Tensor, gold: Tensor, names: Sequence[str]) -> Numbers:
    """How many pixels of each class are right, are of it in truth, and are given it.

    Args:
        given: classes 0 to K - 1, (1, H, W).
        gold: the true ones, (1, H, W).
        names: of the K classes.
    """
    counts = confusion(given, gold, len(names))[0]
    parts = torch.stack([counts.diagonal(), counts.sum(1), counts.sum(0)], 1)  # (K, 3)
    return dict(zip(counts_of(names), parts.flatten().tolist(), strict=True))


def summed_accuracy(sums: Tensor, _: Tensor) -> Tensor:
    """The share of right pixels, of summed counts (..., 3 K)."""
    right, true, _given = _by_class(sums).sum(-2).unbind(-1)
    return (right / true)[..., None]


def summed_mean_iou(sums: Tensor, _: Tensor) -> Tensor:
    """The mean over classes of intersection over union, of summed counts (..., 3 K)."""
    right, true, given = _by_class(sums).unbind(-1)
    return (right / (true + given - right)).nanmean(-1, keepdim=True)


def _by_class(sums: Tensor) -> Tensor:
    return sums.reshape(*sums.shape[:-1], -1, 3)  # (..., K, 3)


class Segmenting(ByMaps):
    """Maps of the predicted class, cut at their mean, against the object's mask."""

    name = "segmentation"
    title = "Finding the object's pixels (after HA tables 2, 5, 6 and UN tables 3, 4)"
    columns = (
        Column("mIoU", counts_of((BACKGROUND, OBJECT)), statistic=summed_mean_iou),
        Column("pixel accuracy", counts_of((BACKGROUND, OBJECT)), statistic=summed_accuracy),
        Column("mAP", ("ap",)),
        Column("mF1", ("f1",)),
        Column("pointing", ("pointing",)),
    )
    note = "Pointing: the share of the map's peak that lies on the object."

    def __init__(
        self, models: Sequence[str] = (VIM, VMAMBA, VIT), task: SceneTask = SCENES
    ) -> None:
        super().__init__(models, task)

    def judge(self, model: nn.Module, example: SceneBatch, image: Tensor, explain: Explain) -> Rows:
        found = explain(model, image, [predicted(model, image)])
        gold = (example.masks > 0).long()
        _, height, width = gold.shape
        return {"": mask_scores(pixel_relevance(found.cpu(), (height, width)), gold)}

    @cached_property
    def maps(self) -> dict[Cell, ImageMap]:
        return image_maps()


def mask_scores(found: Tensor, gold: Tensor, ranking: str = "classes") -> Numbers:
    """The numbers of one map (1, H, W), where gold (1, H, W) is 1 for the object and else 0.

    Args:
        found: the map.
        gold: the object's pixels.
        ranking: of the average precision. Default: ``"classes"``.
    """
    given = foreground(found).long()
    return {
        **pixel_counts(given, gold, (BACKGROUND, OBJECT)),
        "ap": float(segmentation_average_precision(found, gold, ranking=ranking)),
        "f1": float(f1(confusion(given, gold, 2))[0, 1]),
        "pointing": float(gold[found == found.amax()].double().mean()),
    }


class PseudoMasks(ByMaps):
    """Maps of the classes shown, as masks of several objects at once.

    The models learned to name one object; here the scenes hold two, and each map is asked for by
    its class.  A row says above which share of a map's peak a pixel is no background.
    """

    name = "pseudo-masks"
    title = "Masks of several objects from maps of their classes (after UN table 6)"

    def __init__(self, models: Sequence[str] = (VIM, VIT), task: SceneTask | None = None) -> None:
        super().__init__(models, SceneTask(objects=2) if task is None else task)
        self._names = (BACKGROUND, *SCENES.classes)
        self.columns = (
            Column("mIoU", counts_of(self._names), statistic=summed_mean_iou),
            *(Column(name, counts_of([name]), statistic=summed_mean_iou) for name in self._names),
        )

    def judge(self, model: nn.Module, example: SceneBatch, image: Tensor, explain: Explain) -> Rows:
        shown = [int(label) - 1 for label in torch.unique(example.masks) if label > 0]
        found = explain(model, image, shown).cpu()
        _, height, width = example.masks.shape
        sized = pixel_relevance(found, (height, width))  # (len(shown), H, W)
        return {
            f"background {score}": pixel_counts(
                masks(sized, shown, len(self._names), score), example.masks, self._names
            )
            for score in BACKGROUND_SCORES
        }

    @cached_property
    def maps(self) -> dict[Cell, ImageMap]:
        """Those that tell classes apart."""
        return {
            cell: each for cell, each in image_maps().items() if each.by_class and not each.variant
        }


def masks(found: Tensor, shown: Sequence[int], classes: int, score: float) -> Tensor:
    """A class for each pixel, (1, H, W), of maps (len(shown), H, W) of the classes shown."""
    maps = found.new_zeros(1, classes - 1, *found.shape[1:])
    present = torch.zeros(1, classes - 1, dtype=torch.bool)
    maps[0, list(shown)], present[0, list(shown)] = found, True
    return pseudo_masks(maps, present, score)
