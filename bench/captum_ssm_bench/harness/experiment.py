"""What an experiment is: examples with gold, cells to fill, and numbers for each example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from captum_ssm.metrics.sample import Statistic, mean

from .records import Rows


class Cell(NamedTuple):
    """One row of a table.

    Attributes:
        method: name of a method.
        formulation: which variant of it. Default: ``""``, it has one only.
    """

    method: str
    formulation: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: its head.
        numbers: which numbers of an example it is made of.
        better: ``"high"`` or ``"low"``, or empty where neither is better. Default: ``"high"``.
        statistic: of the numbers' sums over examples; see :class:`~captum_ssm.metrics.Sample`.
            Default: their mean.
    """

    name: str
    numbers: tuple[str, ...]
    better: str = "high"
    statistic: Statistic = mean


@dataclass(frozen=True)
class Subject:
    """A model to explain.

    Attributes:
        name: of the model.
        load: gives the model in evaluation mode, on a device.
        fingerprint: of its weights, so that results of others are never mixed in.
    """

    name: str
    load: Callable[[torch.device], nn.Module]
    fingerprint: str


class Experiment(ABC):
    """Base of all experiments.

    Attributes:
        name: as the command line knows it.
        title: the head of its table, with the table of the paper that it is the counterpart of.
        columns: the columns of its table, the one that tells most first.
        examples: how many of each model and seed a full run takes. Default: 100.
        baselines: names of methods that look at no model, or that all others are held against;
            where the best rows are shown, theirs are too. Default: none.
        groups: by name, names of models whose numbers are taken together, too, each model's alike.
            Default: none.
        over_models: the groups whose intervals are over models, and not over examples. Default:
            none.
        against: the row that the others are held against if nobody names one. Default: None, they
            are not.
    """

    name: str
    title: str
    columns: Sequence[Column]
    examples: int = 100
    baselines: Collection[str] = ()
    groups: Mapping[str, Sequence[str]] = MappingProxyType({})
    over_models: Collection[str] = ()
    against: Cell | None = None

    @abstractmethod
    def subjects(self) -> Sequence[Subject]:
        """The models that it explains."""

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """The rows of its table."""

    @abstractmethod
    def example(self, subject: Subject, index: int, seed: int) -> Any:
        """One example, as :meth:`measure` takes it.

        The same subject, index (from 0) and seed give the same one.
        """

    @abstractmethod
    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        """The numbers of one example, by row.

        A method that says something of every layer gives several rows: ``"layer 0"``, ``"mean"``.
        Others give one, of an empty name.

        Args:
            model: as a subject has loaded it.
            example: as of :meth:`example`.
            cell: which method, in which formulation.

        Returns:
            By row, the numbers by name that the columns are made of; NaN for one that the example
            does not have. No rows, if the cell says nothing of this model.
        """

    def together(self) -> AbstractContextManager[None]:
        """A context for the cells of one example, whose common work can be done once.

        Nothing is shared by default.  Sharing must not change a number, since cells that are
        recorded already are left out.
        """
        return nullcontext()

    def chosen(
        self, methods: Collection[str] | None = None, formulations: Collection[str] | None = None
    ) -> list[Cell]:
        """The cells of some methods and formulations, in their order; None is all of them."""
        return [
            cell
            for cell in self.cells()
            if (methods is None or cell.method in methods)
            and (formulations is None or cell.formulation in formulations)
        ]
