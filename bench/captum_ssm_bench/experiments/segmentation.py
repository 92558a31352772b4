"""Relevance as a guess at where the object of an image is.

Shapes: K classes, the background among them; H and W pixels down and across.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr.engine.run import shared_forward
from captum_ssm.metrics import (
    confusion,
    f1,
    foreground,
    pixel_relevance,
    segmentation_average_precision,
)
from captum_ssm.metrics.classes import class_logits

from ..harness.experiment import Cell, Column, Experiment, Subject
from ..harness.records import Numbers, Rows
from ..harness.subjects import bundled
from ..tasks.scenes import SCENES, SceneBatch, SceneTask
from .image_baselines import picture_maps
from .image_maps import ImageMap, image_maps
from .linked_texts import device_of

#: Vision Mamba with the cls token in the middle, VMamba, and a transformer.
MODELS = ("scenes-vim", "scenes-vmamba", "scenes-vit")
#: How many pixels of a class are right, are of it in truth, and are given it.
COUNTS = tuple(
    f"{what} {name}" for name in ("background", "object") for what in ("right", "true", "given")
)


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


class Segmenting(Experiment):
    """Maps of the predicted class, cut at their mean, against the object's mask.

    Args:
        models: names of bundled models. Default: one of each kind.
        task: draws the scenes. Default: the one that the models learned.
    """

    name = "segmentation"
    title = "Finding the object's pixels"
    columns = (
        Column("mIoU", COUNTS, statistic=summed_mean_iou),
        Column("pixel accuracy", COUNTS, statistic=summed_accuracy),
        Column("mAP", ("ap",)),
        Column("mF1", ("f1",)),
        Column("pointing", ("pointing",)),
    )
    baselines = tuple(dict.fromkeys(cell.method for cell in picture_maps()))

    def __init__(self, models: Sequence[str] = MODELS, task: SceneTask = SCENES) -> None:
        self._models, self._task = models, task

    def subjects(self) -> Sequence[Subject]:
        return [bundled(name) for name in self._models]

    def cells(self) -> Sequence[Cell]:
        return list(self._maps)

    def example(self, subject: Subject, index: int, seed: int) -> SceneBatch:
        """One scene, of a held-out background."""
        return self._task.draw(1, random.Random(f"{seed}/{index}").getrandbits(31))

    def together(self) -> AbstractContextManager[None]:
        return shared_forward("all", streams=True)

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        method = self._maps[cell]
        if not method.applies(model):
            return {}
        image, gold = example.images.to(device_of(model)), (example.masks > 0).long()
        found = method.explain(model, image, [predicted(model, image)])
        _, height, width = gold.shape
        return {"": mask_scores(pixel_relevance(found.cpu(), (height, width)), gold)}

    @cached_property
    def _maps(self) -> dict[Cell, ImageMap]:
        return image_maps()


def predicted(model: nn.Module, image: Tensor) -> int:
    """The class that a model gives an image (1, C, H, W)."""
    with torch.no_grad():
        return int(class_logits(model, image).argmax())


def mask_scores(found: Tensor, gold: Tensor) -> Numbers:
    """The numbers of one map (1, H, W), where gold (1, H, W) is 1 for the object and else 0."""
    given = foreground(found).long()
    counts = confusion(given, gold, 2)
    parts = torch.stack([counts[0].diagonal(), counts[0].sum(1), counts[0].sum(0)], 1)  # (2, 3)
    return {
        **dict(zip(COUNTS, parts.flatten().tolist(), strict=True)),
        "ap": float(segmentation_average_precision(found, gold)),
        "f1": float(f1(counts)[0, 1]),
        "pointing": float(gold[found == found.amax()].double().mean()),
    }
