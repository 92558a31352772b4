"""The tables of images: HA tables 2, 5 and 6, UN tables 3 and 4.

Images are resized to what the model takes, 224 x 224 for the checkpoints of the papers, and
normalised as ImageNet's usually are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.explain.loading import Source, load
from captum_ssm.metrics import pixel_relevance
from captum_ssm.models import VisionMamba

from ..data import SegmentedImage, load_imagenet_segmentation
from ..experiments.image_maps import (
    ABLATIONS,
    CODE,
    FORMULATIONS,
    ImageMap,
    attention_alone,
    image_maps,
    later_layers,
    published_code,
)
from ..experiments.segmentation import COLUMNS, mask_scores, predicted
from ..harness.experiment import Cell
from ..harness.records import Rows
from ..harness.tables import Side
from ..published import MASKS, SEGMENTED, SEGMENTED_BY_ATTENTION, SEGMENTED_BY_LRP, VARIANTS
from .table import PaperTable, Published

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _as_measured(name: str) -> str:
    """A variant's formulation: UN's ablations are of its script, HA's choices of the equations."""
    return f"{name}, {CODE}" if name in ABLATIONS else name


def _published() -> dict[Side, Sequence[float]]:
    """What the papers print, in percent, by row."""
    found: dict[Side, Sequence[float]] = {
        Side(method, f"{formulation}, {CODE}"): numbers
        for method, both in SEGMENTED.items()
        for formulation, numbers in zip(("unified", "s6"), both, strict=True)
    }
    found |= {**SEGMENTED_BY_ATTENTION, Side("MambaLRP", "patches"): SEGMENTED_BY_LRP}
    for method, rows in VARIANTS.values():
        for name, numbers in rows.items():
            if name not in FORMULATIONS:
                found[Side(method, _as_measured(name))] = numbers
    return found


class ImagenetSegmentation(PaperTable):
    """Maps of the predicted class, cut at their mean, against the object's outline."""

    name = "imagenet-segmentation"
    title = "Finding the object's pixels in ImageNet-Segmentation"
    sources = "HA tables 2, 5, 6; UN tables 3, 4"
    files = ("gtsegs_ijcv.mat",)
    weights = "a Vision Mamba's file of weights, or the folder of an image classifier"
    columns = COLUMNS
    note = (
        "mAP ranks both classes' scores in one list, as the scripts behind the published tables do."
    )
    published: ClassVar[Published] = {
        side: {column: f"{x / 100:.3f}" for column, x in zip(MASKS, numbers, strict=True)}
        for side, numbers in _published().items()
    }

    @cached_property
    def maps(self) -> Mapping[Cell, ImageMap]:
        """The methods, by cell; variants without the layers that the scripts leave out."""
        known = image_maps()
        plain = [Cell(method, f"{each}, {CODE}") for method in SEGMENTED for each in FORMULATIONS]
        plain += [Cell(*side[:2]) for side in SEGMENTED_BY_ATTENTION]
        plain += [Cell("MambaLRP", "patches"), Cell("LatimFlow", "patches")]
        found = {cell: known[cell] for cell in plain}
        for method, rows in VARIANTS.values():
            for name in rows:
                if name not in FORMULATIONS:
                    each = known[Cell(method, name)]
                    explain = published_code if name in ABLATIONS else later_layers
                    found[Cell(method, _as_measured(name))] = replace(
                        each, explain=partial(explain, of=each.explain)
                    )
        return found

    def cells(self) -> Sequence[Cell]:
        return list(self.maps)

    def load(self, path: Path) -> nn.Module:
        return load(Source(str(path))).model

    def read(self, *paths: Path) -> Sequence[SegmentedImage]:
        return load_imagenet_segmentation(paths[0])

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        of_transformers = Side(*cell) in SEGMENTED_BY_ATTENTION
        if not self.maps[cell].applies(model) or of_transformers > attention_alone(model):
            return {}
        image = prepared(model, example.image)
        found = self.maps[cell].explain(model, image, [predicted(model, image)])
        size = image.shape[2], image.shape[3]
        gold = F.interpolate(example.labels[None, None].float(), size=size)[0].long()
        return {"": mask_scores(pixel_relevance(found.cpu(), size), gold, ranking="together")}


def prepared(model: nn.Module, image: Tensor) -> Tensor:
    """An image (3, H, W) of 0 to 255 as a classifier takes it, (1, 3, S, S)."""
    weight = next(model.parameters())
    pixels = F.interpolate(
        image[None].float() / 255, size=size_of(model), mode="bilinear", antialias=True
    )
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    return ((pixels - mean) / std).to(weight)


def size_of(model: nn.Module) -> tuple[int, int]:
    """Height and width of the images that a classifier was made for."""
    if isinstance(model, VisionMamba):
        patches = model.patch_embed.proj
        (height, width), (down, across) = patches.kernel_size, patches.stride
        return height + (model.grid[0] - 1) * down, width + (model.grid[1] - 1) * across
    config: Any = model.config
    size = config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])
