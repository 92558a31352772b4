"""The rules on a model of bytes, part D of ``bench/REGISTERED.md``: words are the units."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ...harness.experiment import Subject
from ...tasks.byte_texts import KINDS, drawn
from ...training.byte_recipe import PATH, load_bytes, stored
from ...training.fresh import ENOUGH
from .fresh import Fresh
from .questions import Question


class Bytes(Fresh):
    """Relevance of words against Shapley values, on a model that reads their bytes."""

    name = "bytes"
    title = "Agreement of relevance with true interventions, on a model of bytes"
    examples = 40

    def __init__(self) -> None:
        super().__init__()
        names = [f"bytes-{name}" for name, answered in stored().items() if answered >= ENOUGH]
        self.groups = MappingProxyType({"bytes": tuple(names)})

    def subjects(self) -> Sequence[Subject]:
        return [
            Subject(name, _load, hashlib.sha256(PATH.read_bytes()).hexdigest())
            for name in self.groups["bytes"]
        ]

    def example(self, subject: Subject, index: int, seed: int) -> Question:
        return question(f"{seed}/{index}", subject.name.removeprefix("bytes-"))


def _load(device: torch.device) -> nn.Module:
    return load_bytes().to(device)


def question(name: str, mechanism: str) -> Question:
    """Return the first byte of the answer of a text of a mechanism."""
    text = drawn(mechanism, random.Random(name))
    movable = torch.tensor(text.movable)

    def draw(count: int, seed: int) -> Tensor:
        rng = random.Random(seed)
        rows = [
            "".join(rng.choice(KINDS[kind]) if kind else word for word, kind in text.words)
            for _ in range(count)
        ]
        return torch.tensor([[*row.encode()] for row in rows])

    lengths = torch.tensor([len(word.encode()) for word, _ in text.words])
    return Question(
        name,
        torch.tensor([[*text.prompt]]),
        (-1, text.answer.encode()[0]),
        draw,
        movable,
        gold=torch.arange(len(movable)) == text.source,
        words=torch.arange(len(movable)).repeat_interleave(lengths),
    )
