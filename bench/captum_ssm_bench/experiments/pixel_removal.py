"""Removing pixels in the order of their relevance (HA table 1, UN table 1).

Shapes: T classes asked about, C colour channels, H and W pixels down and across; N changed images,
one for each class, fill and direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product

import torch
from torch import Tensor, nn

from captum_ssm.metrics import blurred, image_perturbation, pixel_relevance
from captum_ssm.metrics.fills import filled

from ..harness.experiment import Cell, Column
from ..harness.records import Numbers, Rows
from ..tasks.scenes import SceneBatch
from .image_baselines import Explain
from .image_maps import ImageMap, image_maps
from .on_scenes import ByMaps, predicted

#: Most relevant pixels first, or least, and which area is better.
DIRECTIONS = {"positive": "low", "negative": "high"}
#: What removed pixels become; images run from -1, black, to 1.
FILLS = ("black", "mean", "blur")
#: The published code's blur, as a share of the image's width.
SIGMA = 11 / 224


class ImagePerturbation(ByMaps):
    """Areas under the accuracy while 10 % to 90 % of the pixels are removed, for each fill.

    The rows are of the predicted class, as published, and of the true one.
    """

    name = "image-perturbation"
    title = "Accuracy under the removal of pixels (after HA table 1 and UN table 1)"
    columns = tuple(
        Column(f"{direction}, {fill}", (f"{direction}, {fill}",), better)
        for fill in FILLS
        for direction, better in DIRECTIONS.items()
    )

    def judge(self, model: nn.Module, example: SceneBatch, image: Tensor, explain: Explain) -> Rows:
        rows = {"predicted": predicted(model, image), "true": int(example.labels)}
        classes = list(dict.fromkeys(rows.values()))
        found = areas(model, image, explain(model, image, classes), classes)
        return {row: found[classes.index(asked)] for row, asked in rows.items()}

    @cached_property
    def maps(self) -> dict[Cell, ImageMap]:
        return {cell: each for cell, each in image_maps().items() if not each.variant}


def areas(
    model: nn.Module,
    image: Tensor,
    maps: Tensor,
    classes: Sequence[int],
    black: Tensor | None = None,
) -> list[Numbers]:
    """The areas under the accuracy of each class, by direction and fill.

    Args:
        model: a classifier.
        image: (1, C, H, W).
        maps: relevance to each class, (T, h, w).
        classes: T of them.
        black: what a black pixel is to the model, (C, 1, 1). Default: None, -1.
    """
    relevance = pixel_relevance(maps, (image.shape[2], image.shape[3]))
    fills = {
        "black": torch.full_like(image, -1) if black is None else black.expand_as(image),
        "mean": filled(image, "mean").expand_as(image),
        "blur": blurred(image, SIGMA * image.shape[3]),
    }
    cases = list(product(range(len(classes)), DIRECTIONS, FILLS))
    # least relevant first is most first of the negative
    signs = torch.tensor([1.0 if direction == "positive" else -1.0 for _, direction, _ in cases])
    of_class = torch.tensor([index for index, _, _ in cases])
    found = image_perturbation(
        model,
        image.expand(len(cases), -1, -1, -1),
        relevance[of_class.to(relevance.device)] * signs.to(relevance)[:, None, None],
        [classes[index] for index, _, _ in cases],
        fill=torch.cat([fills[fill] for _, _, fill in cases]),
    )
    by_class: list[dict[str, float]] = [{} for _ in classes]
    for (index, direction, fill), area in zip(cases, found.correct.area().tolist(), strict=True):
        by_class[index][f"{direction}, {fill}"] = area
    return list(by_class)
