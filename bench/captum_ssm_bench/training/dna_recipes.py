"""The bundled classifiers of DNA: how large each is, and for how long it has learned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.errors import OptionError
from captum_ssm.models.dna import Caduceus, HyenaDNA
from captum_ssm.models.folders import save_plain

from ..tasks.motifs import MotifTask
from .recipe import HELD_OUT_SEED, Recipe, Round, Scores

#: Sequences that a line of progress is measured on, and that a trained model is.
_HELD_OUT, _MEASURED = 256, 1024
#: Sequences that go through the model at once.
_AT_ONCE = 128


@dataclass(frozen=True)
class DNAModelSize:
    """The architecture and size of the model to train.

    Attributes:
        architecture: ``"caduceus"``, which reads both strands alike, or ``"hyenadna"``.
            Default: ``"caduceus"``.
        layers: number of blocks. Default: 2.
        hidden: width of the residual stream, of one strand. Default: 24.
        state: states per channel of a Caduceus. Default: 4.
    """

    architecture: Literal["caduceus", "hyenadna"] = "caduceus"
    layers: int = 2
    hidden: int = 24
    state: int = 4

    def __post_init__(self) -> None:
        if self.architecture not in ("caduceus", "hyenadna"):
            raise OptionError(
                f"architecture={self.architecture!r} is not known. Use 'caduceus' or 'hyenadna'."
            )


@dataclass(frozen=True)
class MotifRecipe(Recipe):
    """How a model learns to tell which motifs sequences hold.

    Attributes:
        task: the sequences.
        size: the model.
        steps: optimiser steps.
        learning_rate: the peak. Default: 4e-3.
        batch_size: sequences per step. Default: 32.
    """

    task: MotifTask
    size: DNAModelSize
    steps: tuple[int, ...]
    learning_rate: float = 4e-3
    batch_size: int = 32

    def new(self) -> nn.Module:
        model_class, settings = self._settings()
        return model_class(**settings)

    def _settings(self) -> tuple[type[nn.Module], dict[str, Any]]:
        size = self.size
        common = {"d_model": size.hidden, "n_layer": size.layers, "num_classes": 4, "pool": "mean"}
        if size.architecture == "caduceus":
            return Caduceus, {**common, "d_state": size.state, "fused": True}
        # features of short sequences, which vary as fast as those of long ones do
        options = {
            "l_max": self.task.length,
            "features": 33,
            "filter_order": 32,
            "d_inner": 2 * size.hidden,
        }
        return HyenaDNA, common | options

    def rounds(self, model: nn.Module, seed: int) -> Sequence[Round]:
        rng = random.Random(seed)

        def loss() -> Tensor:
            batch = self.task.draw(self.batch_size, rng)
            return F.cross_entropy(model(batch.ids), batch.labels)

        def score() -> float:
            return self.accuracy(model, _HELD_OUT)

        return [Round(steps, loss, score, self.learning_rate) for steps in self.steps]

    @torch.no_grad()
    def accuracy(self, model: nn.Module, count: int) -> float:
        """The share of sequences whose class is told right.

        Args:
            model: in evaluation mode.
            count: how many, which no training draws.
        """
        batch = self.task.draw(count, HELD_OUT_SEED)
        told = torch.cat([model(ids).argmax(-1) for ids in torch.split(batch.ids, _AT_ONCE)])
        return float((told == batch.labels).float().mean())

    def measure(self, model: nn.Module) -> Scores:
        return {"sequences": {"accuracy": self.accuracy(model, _MEASURED)}}

    def save(self, model: nn.Module, folder: Path) -> None:
        names = {str(number): name for number, name in enumerate(MotifTask.classes)}
        save_plain(model, {**self._settings()[1], "id2label": names}, folder)


#: By the name of the bundled model.
DNA_RECIPES = {
    "motifs-caduceus": MotifRecipe(MotifTask(), DNAModelSize("caduceus"), (600,)),
    "motifs-hyenadna": MotifRecipe(MotifTask(), DNAModelSize("hyenadna"), (5000,)),
}
