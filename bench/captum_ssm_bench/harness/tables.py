"""Tables of results, with intervals: of models, of groups of models, of gains over one row."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm._files import make_folder, write_whole
from captum_ssm.errors import OptionError
from captum_ssm.metrics.sample import Interval, Statistic

from .experiment import Cell, Column, Experiment
from .records import Key, Numbers, Rows
from .statistics import interval

#: The heads of a line beside those of its entries; of these, the ones that tell lines apart.
_KEYS = ("model", "method", "formulation", "row", "examples")
_LABELS = ("method", "formulation", "row")
#: Rows of each model that are printed.
SHOWN = 12


class Side(NamedTuple):
    """A row of a table.

    Attributes:
        method: name of the method.
        formulation: which variant of it. Default: ``""``, it has one only.
        row: which of its rows. Default: ``""``, it has one only.
    """

    method: str
    formulation: str = ""
    row: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


class Entry(NamedTuple):
    """One number of a table with the bounds of its interval, NaN if no example has the number."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Interval) -> Entry:
        """The first of an interval's values."""
        return cls(*(float(part[0]) for part in (found.value, found.low, found.high)))

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        value, low, high = (f"{round(x, 3) + 0.0:.3f}" for x in self)  # without a sign of zero
        return f"{value} [{low}, {high}]"


class Line(NamedTuple):
    """One row of a table.

    Attributes:
        model: name of the model.
        method: name of the method.
        formulation: which variant of it.
        row: which of the method's rows, a layer say; empty if it has one only.
        examples: how many examples it is made of.
        entries: by column.
    """

    model: str
    method: str
    formulation: str
    row: str
    examples: int
    entries: Mapping[str, Entry]


#: The numbers of one row of an example, or of two that are compared.
Example = tuple[Numbers, ...]
#: By model, by seed and index.
Models = Mapping[str, Mapping[tuple[int, int], Example]]


def series_of(results: Iterable[tuple[Key, Rows]]) -> Mapping[Side, Models]:
    """The results by row, model and example."""
    found: dict[Side, dict[str, dict[tuple[int, int], Example]]] = {}
    for key, rows in results:
        for row, numbers in rows.items():
            models = found.setdefault(Side(key.method, key.formulation, row), {})
            models.setdefault(key.model, {})[key.seed, key.example] = (numbers,)
    return found


def paired(one: Models, other: Models) -> Models:
    """The examples that two rows share, with the numbers of both."""
    pairs = {
        name: {at: (*own, *other[name][at]) for at, own in examples.items() if at in other[name]}
        for name, examples in one.items()
        if name in other
    }
    return {name: both for name, both in pairs.items() if both}


def numbers_of(column: Column, examples: Iterable[Example]) -> Tensor:
    """The numbers that a column is made of (n, k), or its gain (n, 2 k).

    Of a gain no number counts where one of a pair's is missing.
    """
    rows = [[numbers[name] for numbers in one for name in column.numbers] for one in examples]
    found = torch.tensor(rows, dtype=torch.float64)
    if found.shape[1] == len(column.numbers):
        return found
    first, second = found.chunk(2, 1)
    missing = first.isnan() | second.isnan()
    return found.masked_fill(torch.cat([missing, missing], 1), float("nan"))


def gain_of(column: Column) -> Statistic:
    """By how much the first half of the numbers is better than the second."""
    sign = -1 if column.better == "low" else 1

    def gain(sums: Tensor, counts: Tensor) -> Tensor:
        halves = zip(sums.chunk(2, -1), counts.chunk(2, -1), strict=True)
        first, second = (column.statistic(s, c) for s, c in halves)
        return sign * (first - second)

    return gain


def lines(experiment: Experiment, results: Iterable[tuple[Key, Rows]]) -> list[Line]:
    """The rows of an experiment's table, sorted by model, method, formulation and row.

    Args:
        experiment: whose columns are wanted.
        results: the records, as of :func:`run`.

    Returns:
        The lines, each entry with its 95 % bootstrap interval.
    """
    return list(_of_models(experiment.columns, series_of(results)))


def group_lines(experiment: Experiment, results: Iterable[tuple[Key, Rows]]) -> list[Line]:
    """The rows of each group of an experiment's models, in which each model counts alike.

    A group is called by its name and the number of its models that were measured.  A row that one
    of them lacks is left out.
    """
    return list(_of_groups(experiment, series_of(results)))


def gain_lines(
    experiment: Experiment, results: Iterable[tuple[Key, Rows]], against: Cell
) -> tuple[Experiment, list[Line]]:
    """By how much each row is better than one of them, on the same examples.

    Args:
        experiment: whose columns are wanted.
        results: the records, as of :func:`.run`.
        against: the row that the others are held against.

    Returns:
        An experiment whose columns are the gains, each the higher the better, and its lines: of
        each group, then of each model.

    Raises:
        OptionError: when the row that is held against was not measured.
    """
    series, other = series_of(results), Side(*against)
    if other not in series:
        measured = "; ".join(map(str, sorted(series)))
        raise OptionError(f"against={str(other)!r} was not measured. Use one of: {measured}.")
    held = copy(experiment)
    held.name = f"{experiment.name}-against"
    held.title = f"{experiment.title}: gain over {other}"
    held.columns = [replace(c, better="high" if c.better else "") for c in experiment.columns]
    pairs = {side: paired(own, series[other]) for side, own in series.items() if side != other}
    return held, [
        *_of_groups(experiment, pairs),
        *_of_models(experiment.columns, pairs),
    ]


def _of_models(columns: Sequence[Column], series: Mapping[Side, Models]) -> Iterator[Line]:
    """The rows of each model."""
    for name in sorted({name for models in series.values() for name in models}):
        for side, models in sorted(series.items()):
            if name in models:
                yield _line(name, side, columns, [models[name]])


def _of_groups(experiment: Experiment, series: Mapping[Side, Models]) -> Iterator[Line]:
    """The rows that all measured models of a group have."""
    for group, names in experiment.groups.items():
        over_models = group in experiment.over_models
        measured = sorted({name for own in series.values() for name in own}.intersection(names))
        count = f"({len(measured)} model{'s' if len(measured) > 1 else ''})"
        for side, models in sorted(series.items()):
            if measured and models.keys() >= set(measured):
                examples = [models[name] for name in measured]
                yield _line(
                    f"{group} {count}", side, experiment.columns, examples, over_models=over_models
                )


def _line(
    name: str,
    side: Side,
    columns: Sequence[Column],
    models: Sequence[Mapping[tuple[int, int], Example]],
    *,
    over_models: bool = False,
) -> Line:
    entries = {}
    for column in columns:
        numbers = [numbers_of(column, examples.values()) for examples in models]
        compared = numbers[0].shape[1] > len(column.numbers)
        statistic = gain_of(column) if compared else column.statistic
        entries[column.name] = Entry.of(interval(statistic, numbers, over_models=over_models))
    return Line(name, *side, sum(map(len, models)), entries)


# --- what is printed and written --------------------------------------------------------------


def shown(experiment: Experiment, table: Iterable[Line]) -> list[Line]:
    """The best lines of one model, and those of baselines, wherever they are.

    Of each method and formulation it is the row that is best by the first column.  Where neither
    high nor low is better, it is the means over layers, or all rows if there are none.
    """
    column, found = experiment.columns[0], list(table)
    if not column.better:
        return [line for line in found if line.row.startswith("mean")] or found
    sign = 1 if column.better == "low" else -1

    def badness(line: Line) -> float:
        value = line.entries[column.name].value
        return math.inf if math.isnan(value) else sign * value

    best: dict[tuple[str, str], Line] = {}
    for line in sorted(found, key=badness):
        best.setdefault((line.method, line.formulation), line)
    rows = list(best.values())
    return rows[:SHOWN] + [line for line in rows[SHOWN:] if line.method in experiment.baselines]


def as_text(experiment: Experiment, table: Sequence[Line]) -> str:
    """The lines of each model that are shown, without intervals, for a terminal."""
    parts = [experiment.title]
    for model, own in _by_model(table):
        head, rows = _cells(experiment, shown(experiment, own))
        rows = [head, *([cell.partition(" [")[0] for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        parts += [f"{model}, {max(line.examples for line in own)} examples"]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            parts.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(parts)


def as_csv(experiment: Experiment, table: Iterable[Line]) -> str:
    """One row per line, with the bounds of the intervals."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    bounds = [f"{c.name}{end}" for c in experiment.columns for end in ("", " low", " high")]
    writer.writerow([*_KEYS, *bounds])
    for *keys, entries in table:
        writer.writerow([*keys, *(f"{x:.6g}" for entry in entries.values() for x in entry)])
    return out.getvalue()


def write_table(experiment: Experiment, table: Sequence[Line], folder: str | Path) -> Path:
    """Write the table as csv.

    Args:
        experiment: whose table it is.
        table: its lines.
        folder: where the file goes; made if it is not there.

    Returns:
        The file.

    Raises:
        WriteError: when the file cannot be written; it then holds what it held before.
    """
    place = Path(folder) / f"{experiment.name}.csv"
    make_folder(place.parent)
    write_whole(place, as_csv(experiment, table))
    return place


def _by_model(table: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    for model in sorted({line.model for line in table}):
        yield model, [line for line in table if line.model == model]


def _cells(experiment: Experiment, table: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows, with those of method, formulation and row that some line has."""
    labels = [name for name in _LABELS if any(getattr(line, name) for line in table)]
    rows = [
        [*(getattr(line, name) for name in labels), *map(str, line.entries.values())]
        for line in table
    ]
    return [*labels, *(column.name for column in experiment.columns)], rows
