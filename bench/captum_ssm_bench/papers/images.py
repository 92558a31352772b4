"""The tables of images: HA tables 1, 2, 5 and 6, UN tables 1, 3, 4 and 6.

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
from captum_ssm.metrics.classes import class_logits
from captum_ssm.models import VisionMamba

from ..data import (
    VOC_CLASSES,
    VOC_IGNORED,
    LabelledImage,
    SegmentedImage,
    load_image_folders,
    load_imagenet_segmentation,
    load_pascal_voc,
)
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
from ..experiments.masks import (
    BACKGROUND,
    BACKGROUND_SCORES,
    OBJECT,
    counts_of,
    mask_scores,
    pixel_counts,
    summed_accuracy,
    summed_mean_iou,
)
from ..experiments.masks import masks as masks_of
from ..experiments.pixel_removal import DIRECTIONS, FILLS, areas
from ..harness.experiment import Cell, Column
from ..harness.records import Rows
from ..harness.verdicts import Side
from ..published.on_images import (
    OF_ATTENTION,
    PERTURBED,
    PERTURBED_BY_ATTENTION,
    SEGMENTED,
    SEGMENTED_BY_ATTENTION,
    VARIANTS,
)
from .table import PaperTable, Published

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MASKS = ("pixel accuracy", "mAP", "mIoU")
_AREAS = tuple(f"{direction}, black" for direction in DIRECTIONS)

#: The rows of the tables, of Vision Mamba by the authors' scripts and of a transformer.
PLAIN = (
    *(
        Cell(method, f"{formulation}, {CODE}")
        for method in SEGMENTED
        for formulation in FORMULATIONS
    ),
    *(Cell(*each) for each in OF_ATTENTION),
    Cell("MambaLRP", "patches"),
    Cell("LatimFlow", "patches"),
)


def published_rows(
    columns: Sequence[str],
    of_mamba: Mapping[str, Sequence[Sequence[float]]],
    of_attention: Sequence[Sequence[float]],
) -> dict[Side, dict[str, str]]:
    """What the papers print of raw attention, rollout and attribution, by row."""
    found = {
        Side(method, f"{formulation}, {CODE}"): numbers
        for method, both in of_mamba.items()
        for formulation, numbers in zip(("unified", "s6"), both, strict=True)
    }
    found |= {Side(*each): n for each, n in zip(OF_ATTENTION, of_attention, strict=True)}
    return {side: said(columns, numbers) for side, numbers in found.items()}


def said(columns: Sequence[str], numbers: Sequence[float]) -> dict[str, str]:
    """Percentages of a paper as shares of 1, by column."""
    return {column: f"{number / 100:.3f}" for column, number in zip(columns, numbers, strict=True)}


def _as_measured(name: str) -> str:
    """A variant's formulation: UN's ablations are of its script, HA's choices of the equations."""
    return f"{name}, {CODE}" if name in ABLATIONS else name


def _variants() -> dict[Cell, ImageMap]:
    """What HA tables 5 and 6 and UN table 4 vary; without the layers that the scripts leave out."""
    known, found = image_maps(), dict[Cell, ImageMap]()
    for method, rows in VARIANTS.values():
        for name in rows:
            if name not in FORMULATIONS:
                each = known[Cell(method, name)]
                explain = published_code if name in ABLATIONS else later_layers
                found[Cell(method, _as_measured(name))] = replace(
                    each, explain=partial(explain, of=each.explain)
                )
    return found


class OnImages(PaperTable):
    """Base of the tables of images."""

    weights = "a Vision Mamba's file of weights, or the folder of an image classifier"

    @cached_property
    def maps(self) -> Mapping[Cell, ImageMap]:
        """The methods, by cell."""
        known = image_maps()
        return {cell: known[cell] for cell in PLAIN}

    def cells(self) -> Sequence[Cell]:
        return list(self.maps)

    def load(self, path: Path) -> nn.Module:
        return load(Source(str(path))).model

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        of_transformers = tuple(cell) in OF_ATTENTION
        if not self.maps[cell].applies(model) or of_transformers > attention_alone(model):
            return {}
        return self.judge(model, example, prepared(model, example.image), cell)

    def judge(self, model: nn.Module, example: Any, image: Tensor, cell: Cell) -> Rows:
        """The numbers of one example, by row."""
        raise NotImplementedError

    def _predicted(self, model: nn.Module, image: Tensor) -> int:
        with torch.no_grad():
            return int(class_logits(model, image).argmax())


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


class ImagenetSegmentation(OnImages):
    """Maps of the predicted class, cut at their mean, against the object's outline."""

    name = "imagenet-segmentation"
    title = "Finding the object's pixels in ImageNet-Segmentation"
    sources = "HA tables 2, 5, 6; UN tables 3, 4"
    files = ("gtsegs_ijcv.mat",)
    columns = (
        Column("mIoU", counts_of((BACKGROUND, OBJECT)), statistic=summed_mean_iou),
        Column("pixel accuracy", counts_of((BACKGROUND, OBJECT)), statistic=summed_accuracy),
        Column("mAP", ("ap",)),
        Column("mF1", ("f1",)),
    )
    note = (
        "mAP ranks both classes' scores in one list, as the scripts behind the published tables do."
    )

    @cached_property
    def maps(self) -> Mapping[Cell, ImageMap]:
        return {**super().maps, **_variants()}

    published: ClassVar[Published] = {
        **published_rows(_MASKS, SEGMENTED, SEGMENTED_BY_ATTENTION),
        Side("MambaLRP", "patches"): said(_MASKS, (71.19, 77.04, 49.98)),
        **{
            Side(method, _as_measured(name)): said(_MASKS, numbers)
            for method, rows in VARIANTS.values()
            for name, numbers in rows.items()
            if name not in FORMULATIONS
        },
    }

    def read(self, *paths: Path) -> Sequence[SegmentedImage]:
        return load_imagenet_segmentation(paths[0])

    def judge(self, model: nn.Module, example: SegmentedImage, image: Tensor, cell: Cell) -> Rows:
        found = self.maps[cell].explain(model, image, [self._predicted(model, image)])
        size = image.shape[2], image.shape[3]
        gold = F.interpolate(example.labels[None, None].float(), size=size)[0].long()
        relevance = pixel_relevance(found.cpu(), size)
        return {"": mask_scores(relevance, gold, ranking="together")}


class ImagenetRemoval(OnImages):
    """Areas under the accuracy while 10 % to 90 % of the pixels are removed, for each fill."""

    name = "imagenet"
    title = "Accuracy under the removal of pixels of ImageNet's images"
    sources = "HA table 1; UN table 1"
    files = ("a folder for each class",)
    columns = tuple(
        Column(f"{direction}, {fill}", (f"{direction}, {fill}",), better)
        for fill in FILLS
        for direction, better in DIRECTIONS.items()
    )
    published: ClassVar[Published] = published_rows(_AREAS, PERTURBED, PERTURBED_BY_ATTENTION)

    def read(self, *paths: Path) -> Sequence[LabelledImage]:
        return load_image_folders(paths[0])

    def judge(self, model: nn.Module, example: LabelledImage, image: Tensor, cell: Cell) -> Rows:
        classes = [self._predicted(model, image)]
        found = self.maps[cell].explain(model, image, classes)
        black = (-torch.tensor(MEAN) / torch.tensor(STD)).view(3, 1, 1).to(image)
        return {"": areas(model, image, found, classes, black)[0]}


class PascalVoc(OnImages):
    """Masks of the classes that an image shows, from maps of a classifier of images."""

    name = "pascal-voc"
    title = "Masks of Pascal VOC's images from maps of their classes"
    sources = "UN table 6"
    files = ("VOC2012",)
    weights = "weights trained on VOC's image labels, with the 20 classes in order"
    columns = (
        Column("mIoU", counts_of(VOC_CLASSES), statistic=summed_mean_iou),
        *(Column(each, counts_of([each]), statistic=summed_mean_iou) for each in VOC_CLASSES),
    )
    note = "A row says above which share of a map's peak a pixel is no background."
    published: ClassVar[Published] = {
        Side("MambaAttribution", f"unified, {CODE}", f"background {score}"): {"mIoU": "0.521"}
        for score in BACKGROUND_SCORES
    }

    @cached_property
    def maps(self) -> Mapping[Cell, ImageMap]:
        """Those that tell classes apart."""
        known = image_maps()
        return {cell: each for cell, each in super().maps.items() if known[cell].by_class}

    def read(self, *paths: Path) -> Sequence[SegmentedImage]:
        return load_pascal_voc(paths[0], "val")

    def judge(self, model: nn.Module, example: SegmentedImage, image: Tensor, cell: Cell) -> Rows:
        shown = [int(c) - 1 for c in torch.unique(example.labels) if 0 < c < len(VOC_CLASSES)]
        if not shown:
            return {}
        size = example.labels.shape[0], example.labels.shape[1]
        found = self.maps[cell].explain(model, image, shown).cpu()
        sized = pixel_relevance(found, size)
        counts = example.labels != VOC_IGNORED
        gold = example.labels[counts][None, None]
        return {
            f"background {score}": pixel_counts(
                masks_of(sized, shown, len(VOC_CLASSES), score)[:, counts][:, None],
                gold,
                VOC_CLASSES,
            )
            for score in BACKGROUND_SCORES
        }
