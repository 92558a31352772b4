"""What a published table needs to be measured again: examples and models from files."""

from __future__ import annotations

import hashlib
import math
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from captum_ssm.attr.engine.sharing import shared_forward
from captum_ssm.errors import DataNotFoundError, OptionError

from ..harness.experiment import Column, Experiment, Subject
from ..harness.tables import Line, Side, markdown
from ..harness.verdicts import BEST

#: Weights of a folder that transformers has written; what else lies there may change.
_WEIGHTS = ("*.safetensors", "*.bin", "config.json")


#: What papers print, by row and column.
Published = Mapping[Side, Mapping[str, str]]


class PaperTable(Experiment):
    """Base of the published tables, measured on the data and the weights that they are of.

    Args:
        paths: where the data is; :attr:`files` says what each path is.
        models: by the name that the table is to show, where each model is.

    Attributes:
        files: what the paths are, in their order.
        sources: which tables it is the counterpart of.
        published: by row, what the papers print, by column; what is a share of 1 here is one there.
    """

    files: ClassVar[Sequence[str]]
    sources: ClassVar[str]
    published: ClassVar[Published] = MappingProxyType({})

    def __init__(self, paths: Sequence[str | Path], models: Mapping[str, str | Path]) -> None:
        if len(paths) != len(self.files):
            raise OptionError(
                f"--data {self.name} needs {len(self.files)} paths behind it ("
                f"{', '.join(self.files)}), got {len(paths)}."
            )
        if not models:
            raise OptionError(
                f"--data {self.name} is measured on your own weights: name them by "
                f"--models NAME=PATH, {self.weights}."
            )
        self._paths, self._models = [Path(path) for path in paths], models

    @property
    @abstractmethod
    def weights(self) -> str:
        """What the path of a model is."""

    @abstractmethod
    def read(self, *paths: Path) -> Sequence[Any]:
        """The examples."""

    @abstractmethod
    def load(self, path: Path) -> nn.Module:
        """A model, in evaluation mode."""

    @cached_property
    def data(self) -> Sequence[Any]:
        """All examples, in the order of the files."""
        return self.read(*self._paths)

    @property
    def examples(self) -> int:  # type: ignore[override]
        """All of them."""
        return len(self.data)

    def column(self, name: str) -> Column:
        """The column of a name."""
        return next(column for column in self.columns if column.name == name)

    def subjects(self) -> Sequence[Subject]:
        return [
            Subject(name, partial(self._load, Path(path)), _fingerprint(name, Path(path)))
            for name, path in self._models.items()
        ]

    def example(self, subject: Subject, index: int, seed: int) -> Any:
        """Some examples are as good as all: they come in an order of the seed's own."""
        return self.data[self._orders.setdefault(seed, self._order(seed))[index % len(self.data)]]

    def together(self) -> AbstractContextManager[None]:
        return shared_forward("all", streams=True)

    def _load(self, path: Path, device: torch.device) -> nn.Module:
        return self.load(path).eval().to(device)

    def _order(self, seed: int) -> list[int]:
        return random.Random(seed).sample(range(len(self.data)), len(self.data))

    @cached_property
    def _orders(self) -> dict[int, list[int]]:
        return {}


def beside(table: PaperTable, lines: Iterable[Line]) -> str:
    """The rows that a paper prints, too: its figure and the one measured, with its interval."""
    rows = []
    found = list(lines)
    for side, figures in table.published.items():
        for column, said in figures.items():
            rows += [
                [line.model, str(side), column, said, str(line.entries[column])]
                for line in _of(side, found, table.column(column))
            ]
    if not rows:
        return f"No row of {table.sources} is among those measured."
    head = ["model", "row", "column", table.sources, "here"]
    return markdown(head, rows)


def _of(side: Side, lines: Sequence[Line], column: Column) -> Iterator[Line]:
    """The line of each model that a row is; of its layers the best one, as the papers choose it."""
    for model in dict.fromkeys(line.model for line in lines):
        own = [
            line
            for line in lines
            if (line.model, line.method, line.formulation) == (model, *side[:2])
            and (line.row == side.row or (side.row == BEST and line.row.startswith("layer ")))
        ]
        known = [line for line in own if not math.isnan(line.entries[column.name].value)]
        if known:
            pick = min if column.better == "low" else max
            yield pick(known, key=lambda line: line.entries[column.name].value)


def _fingerprint(name: str, path: Path) -> str:
    files = [path]
    if path.is_dir():
        files = sorted(file for kind in _WEIGHTS for file in path.glob(kind))
    if not files or not all(file.is_file() for file in files):
        raise DataNotFoundError(
            f"--models {name}={path}: there are no weights. Give a file of weights, or a folder "
            "that transformers has written."
        )
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while part := opened.read(2**24):
                digest.update(part)
    return digest.hexdigest()
