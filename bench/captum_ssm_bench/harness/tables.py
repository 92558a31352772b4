"""Tables of results, with intervals over examples; and as files and pictures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from captum_ssm._files import make_folder, replacing, write_whole
from captum_ssm.viz.intervals import Interval, plot_intervals

from .experiment import Column, Experiment, file_name, name_of
from .records import Key, Numbers, Rows
from .spread import CONFIDENCE, interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 110
#: What a line says beside its entries.
_KEYS = ("model", "method", "formulation", "row", "trainings", "examples")
#: Of these, what tells the lines of one model apart.
_LABELS = ("method", "formulation", "row")


@dataclass(frozen=True)
class Entry:
    """One number of a table.

    Attributes:
        value: over all examples; NaN if no example has the number.
        low: the interval's lower bound.
        high: its upper bound.

    Example:
        >>> from captum_ssm_bench import Entry
        >>> str(Entry(value=0.5, low=0.25, high=0.75))
        '0.500 [0.250, 0.750]'
    """

    value: float
    low: float
    high: float

    @property
    def interval(self) -> Interval:
        """As a picture is drawn of it: the bounds, and the value between them."""
        return self.low, self.value, self.high

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        value, low, high = (f"{round(x, 3) + 0.0:.3f}" for x in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"  # without a sign of zero


@dataclass(frozen=True)
class Line:
    """One row of a table.

    Attributes:
        model: name of the model.
        method: name of the method.
        formulation: which variant of it.
        row: which of the method's rows, a layer say; empty if it has one only.
        trainings: how many trained models of this name it is made of.
        examples: how many examples of all of them.
        entries: by column.
    """

    model: str
    method: str
    formulation: str
    row: str
    trainings: int
    examples: int
    entries: Mapping[str, Entry]

    @property
    def label(self) -> str:
        """What tells it apart from the other lines of its model."""
        return ", ".join(filter(None, (getattr(self, name) for name in _LABELS)))


def lines(experiment: Experiment, results: Iterable[tuple[Key, Rows]]) -> list[Line]:
    """The rows of an experiment's table, sorted by model, method, formulation and row.

    Args:
        experiment: whose columns are wanted.
        results: what was measured, as of :func:`run`; trainings of one model share its lines.

    Returns:
        The lines, each entry with its 95 % bootstrap interval.

    Example:
        >>> from captum_ssm_bench import EXPERIMENTS, Key, lines
        >>> experiment = EXPERIMENTS["decomposition-error"]  # its one column is "error"
        >>> keys = [Key(experiment.name, "m", "Latim", "silu", 0, example) for example in (0, 1)]
        >>> results = [(keys[0], {"mean": {"error": 0.1}}), (keys[1], {"mean": {"error": 0.3}})]
        >>> (line,) = lines(experiment, results)
        >>> line.examples, str(line.entries["error"])
        (2, '0.200 [0.100, 0.300]')
    """
    grouped: dict[tuple[str, str, str, str], dict[str, list[Numbers]]] = {}
    for key, rows in results:
        for row, numbers in rows.items():
            where = (name_of(key.model), key.method, key.formulation, row)
            grouped.setdefault(where, {}).setdefault(key.model, []).append(numbers)
    return [
        Line(
            *where,
            len(models),
            sum(map(len, models.values())),
            {column.name: _entry(column, models.values()) for column in experiment.columns},
        )
        for where, models in sorted(grouped.items())
    ]


def numbers_of(column: Column, examples: Iterable[Numbers]) -> Tensor:
    """What a column is made of, (n, k)."""
    rows = [[one[name] for name in column.numbers] for one in examples]
    return torch.tensor(rows, dtype=torch.float64)


def _entry(column: Column, models: Iterable[Iterable[Numbers]]) -> Entry:
    found = interval(column.statistic, [numbers_of(column, examples) for examples in models])
    return Entry(*(float(part[0]) for part in (found.value, found.low, found.high)))


def as_markdown(experiment: Experiment, table: Sequence[Line]) -> str:
    """A section per model; the best value of each column is bold."""
    parts = [f"# {experiment.title}"]
    for model in sorted({line.model for line in table}):
        own = [line for line in table if line.model == model]
        labels = labels_of(own)
        head = [*labels, *(column.name for column in experiment.columns)]
        best = {column.name: _best(column, own) for column in experiment.columns}
        rows = []
        for line in own:
            rows.append([getattr(line, name) for name in labels])
            for name, entry in line.entries.items():
                rows[-1].append(f"**{entry}**" if entry.value == best[name] else str(entry))
        parts += ["", f"## {model}, {sample_size(own)}", "", markdown(head, rows)]
    parts += ["", legend(experiment)]
    return "\n".join(parts) + "\n"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, without a line's end behind it."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def legend(experiment: Experiment) -> str:
    """What the brackets and columns of a table say, and what has to be known to read it."""
    brackets = (
        f"In brackets {CONFIDENCE:.0%} bootstrap intervals over examples, and over trainings where "
        "there are several."
    )
    directions = ", ".join(f"{c.name}: {c.direction}" for c in experiment.columns if c.better)
    return " ".join(
        filter(None, (brackets, f"{directions}." if directions else "", experiment.note))
    )


def labels_of(table: Iterable[Line]) -> list[str]:
    """Those of method, formulation and row that some line of a table has."""
    found = list(table)
    return [name for name in _LABELS if any(getattr(line, name) for line in found)]


def as_csv(experiment: Experiment, table: Sequence[Line]) -> str:
    """One row per line, with the bounds of the intervals."""
    out = io.StringIO()
    names = [column.name for column in experiment.columns]
    writer = csv.writer(out, lineterminator="\n")
    bounds = [f"{name}{end}" for name in names for end in ("", " low", " high")]
    writer.writerow([*_KEYS, *bounds])
    for line in table:
        numbers = [x for e in line.entries.values() for x in (e.value, e.low, e.high)]
        keys = (getattr(line, name) for name in _KEYS)
        writer.writerow([*keys, *(f"{x:.6g}" for x in numbers)])
    return out.getvalue()


def as_json(experiment: Experiment, table: Sequence[Line]) -> str:
    """All of it; null where there is no number."""
    entries = [
        {
            **{name: getattr(line, name) for name in _KEYS},
            **{name: _readable(entry) for name, entry in line.entries.items()},
        }
        for line in table
    ]
    whole = {"experiment": experiment.name, "title": experiment.title, "lines": entries}
    return json.dumps(whole, indent=2) + "\n"


def write_tables(experiment: Experiment, table: Sequence[Line], folder: str | Path) -> list[Path]:
    """Write the table as markdown, csv and json, and as a picture where matplotlib is installed.

    Args:
        experiment: whose table it is.
        table: its lines.
        folder: where the files go; made if it is not there.

    Returns:
        The files.

    Raises:
        WriteError: when a file cannot be written; it then holds what it held before.
        OptionError: when no file can be named after the experiment.

    Example:
        >>> import tempfile
        >>> from captum_ssm_bench import EXPERIMENTS, Key, lines, write_tables
        >>> experiment = EXPERIMENTS["decomposition-error"]
        >>> key = Key(experiment.name, "m", "Latim", "silu", seed=0, example=0)
        >>> table = lines(experiment, [(key, {"mean": {"error": 0.1}})])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = write_tables(experiment, table, folder)
        >>> [path.suffix for path in paths[:3]]  # with matplotlib, .png is the fourth
        ['.md', '.csv', '.json']
    """
    place, name = Path(folder), file_name(experiment)
    make_folder(place)
    paths = []
    for ending, write in (("md", as_markdown), ("csv", as_csv), ("json", as_json)):
        paths.append(place / f"{name}.{ending}")
        write_whole(paths[-1], write(experiment, table))
    if table and find_spec("matplotlib") is not None:
        paths.append(place / f"{name}.png")
        with replacing(paths[-1]) as file:
            drawn = picture(experiment.columns, table, experiment.title)
            drawn.savefig(file, dpi=_DOTS_PER_INCH)
    return paths


def picture(columns: Sequence[Column], table: Iterable[Line], title: str = "") -> Figure:
    """Lines as dots with bars, a panel for each of some columns and a group for each model."""
    groups: dict[str, dict[str, list[Interval]]] = {}
    for line in table:
        found = [line.entries[column.name].interval for column in columns]
        groups.setdefault(line.model, {})[line.label] = found
    heads = [f"{c.name} ({c.direction})" if c.better else c.name for c in columns]
    return plot_intervals(groups, heads, title=title)[0]


def sample_size(table: Sequence[Line]) -> str:
    """How many examples, and of how many trainings if there are several."""
    trainings = max(line.trainings for line in table)
    of = f" of {trainings} trainings" if trainings > 1 else ""
    return f"{max(line.examples for line in table)} examples{of}"


def _best(column: Column, table: Sequence[Line]) -> float:
    if not column.better:
        return math.nan
    known = [
        line.entries[column.name].value
        for line in table
        if not math.isnan(line.entries[column.name].value)
    ]
    return (max if column.better == "high" else min)(known, default=math.nan)


def _readable(entry: Entry) -> dict[str, float | None]:
    return {
        name: None if math.isnan(x) else x
        for name, x in (("value", entry.value), ("low", entry.low), ("high", entry.high))
    }
