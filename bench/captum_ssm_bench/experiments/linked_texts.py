"""Experiments on texts whose last words follow from known earlier ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from captum_ssm.attr.engine.run import shared_forward

from ..harness.experiment import Experiment, Subject
from ..harness.subjects import bundled
from ..tasks.linked import LinkedBatch, LinkedTask


class LinkedTexts(Experiment):
    """Base of experiments on the texts that bundled language models were trained on.

    Args:
        name: as the command line knows it.
        title: what it shows.
        tasks: by the name of a bundled model, its task.
    """

    def __init__(self, name: str, title: str, tasks: Mapping[str, LinkedTask]) -> None:
        self.name, self.title, self._tasks = name, title, tasks

    def subjects(self) -> Sequence[Subject]:
        return [bundled(name) for name in self._tasks]

    def text(self, subject: Subject, index: int, seed: int) -> LinkedBatch:
        """A batch of one text, the same for all models of a name."""
        task = self._tasks[subject.name]
        return task.batch(task.draw(1, random.Random(f"{seed}/{index}")))

    def together(self) -> AbstractContextManager[None]:
        return shared_forward("all", streams=True)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's weights."""
    return next(model.parameters()).device
