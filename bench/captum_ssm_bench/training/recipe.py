"""What a recipe is: how a bundled model is made, trained, measured and saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

#: Far from any training seed, and from the seeds of the tests.
HELD_OUT_SEED = 987_654_321

#: By what was looked at, such as ``"length 8"``, the scores by name.
Scores = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Round:
    """A part of a training, in which the learning rate rises and falls once.

    Attributes:
        steps: optimiser steps.
        loss: draws a batch and returns the model's loss.
        score: the model's accuracy on held-out examples, for the lines of progress.
        learning_rate: the peak. Default: 2e-3.
        help: what is trained along with the model, and is no part of it. Default: None, nothing.
        stop: the step after which the round ends early. Default: None, it does not.
    """

    steps: int
    loss: Callable[[], Tensor]
    score: Callable[[], float]
    learning_rate: float = 2e-3
    help: nn.Module | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Recipe(ABC):
    """How a bundled model is made, trained, measured and saved.

    Attributes:
        task: what it learns.
        size: the model, a dataclass of numbers and names.
        steps: optimiser steps of each round of the training.
    """

    task: Any
    size: Any
    steps: tuple[int, ...]

    @abstractmethod
    def new(self) -> nn.Module:
        """A freshly initialised model; its weights are drawn by torch's generator."""

    @abstractmethod
    def rounds(self, model: nn.Module, seed: int) -> Sequence[Round]:
        """What trains a model, round after round; the same seed draws the same batches."""

    @abstractmethod
    def measure(self, model: nn.Module) -> Scores:
        """The scores of a trained model on examples that no training draws."""

    @abstractmethod
    def save(self, model: nn.Module, folder: Path) -> None:
        """Writes the model and its key to a folder, for :func:`~.models.folders.load_folder`."""
