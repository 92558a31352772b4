"""What experiments on images have in common: scenes, and the bundled models that classify them."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from captum_ssm.attr.engine.sharing import shared_forward
from captum_ssm.metrics.classes import class_logits

from ..harness.experiment import Cell, Experiment, Subject
from ..harness.records import Rows
from ..harness.subjects import bundled
from ..tasks.scenes import SCENES, SceneBatch, SceneTask
from .image_baselines import Explain, picture_maps
from .image_maps import ImageMap
from .linked_texts import device_of

#: Vision Mamba with the cls token in the middle and in front, VMamba, and a transformer.
VIM, VIM_FIRST, VMAMBA, VIT = "scenes-vim", "scenes-vim-first", "scenes-vmamba", "scenes-vit"


class OnScenes(Experiment):
    """Base of the experiments whose examples are scenes.

    Args:
        models: names of bundled models. Default: Vision Mamba with the cls token in the middle, and
            a transformer.
        task: draws the scenes. Default: that which the models learned.
    """

    def __init__(self, models: Sequence[str] = (VIM, VIT), task: SceneTask = SCENES) -> None:
        self._models = models
        self.task = task

    def subjects(self) -> Sequence[Subject]:
        return [bundled(name) for name in self._models]

    def example(self, subject: Subject, index: int, seed: int) -> Any:
        """A :class:`~captum_ssm_bench.tasks.SceneBatch` of one scene, of a held-out background."""
        return self.task.draw(1, random.Random(f"{seed}/{index}").getrandbits(31))

    def together(self) -> AbstractContextManager[None]:
        return shared_forward("all", streams=True)


class ByMaps(OnScenes):
    """Base of those that judge maps of patches or pixels."""

    baselines = tuple(dict.fromkeys(cell.method for cell in picture_maps()))

    @property
    @abstractmethod
    def maps(self) -> Mapping[Cell, ImageMap]:
        """The methods, by cell."""

    @abstractmethod
    def judge(self, model: nn.Module, example: SceneBatch, image: Tensor, explain: Explain) -> Rows:
        """The numbers of one example, by row, from the maps of a method."""

    def cells(self) -> Sequence[Cell]:
        return list(self.maps)

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        method = self.maps[cell]
        if not method.applies(model):
            return {}
        return self.judge(model, example, image_of(example, model), method.explain)


def image_of(example: SceneBatch, model: nn.Module) -> Tensor:
    """The image of an example, (1, C, H, W), where the model is."""
    return example.images.to(device_of(model))


def predicted(model: nn.Module, image: Tensor) -> int:
    """The class that a model gives an image (1, C, H, W)."""
    return int(class_logits(model, image).argmax())
