"""Which of two rows of a table is better, and whether that is what was published.

A comparison is decided from paired differences: both rows are measured on the same examples, which
are drawn anew together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm.errors import OptionError
from captum_ssm.metrics.sample import Sample, Statistic

from .experiment import Column, Experiment, name_of
from .records import Key, Numbers, Rows
from .spread import interval
from .tables import Entry, numbers_of

#: In place of a row: of the method's layers the one that is best in every second example; the
#: comparison is then made on the other examples, so that the choice favours nobody.
BEST = "best layer"

_LAYER = re.compile(r"layer \d+")


class Side(NamedTuple):
    """A row of a table.

    Attributes:
        method: name of the method.
        formulation: which variant of it. Default: ``""``, it has one only.
        row: which of its rows; or :data:`BEST`. Default: ``""``, it has one only.

    Example:
        >>> from captum_ssm_bench import Side
        >>> str(Side("LatimNorm l2", "silu", "layer 1"))
        'LatimNorm l2, silu, layer 1'
    """

    method: str
    formulation: str = ""
    row: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


@dataclass(frozen=True)
class Comparison:
    """A row that is said to be better than another.

    Attributes:
        experiment: name of the experiment.
        column: name of a column of its table.
        better: the row said to be better.
        worse: the other one.
        source: who says so.
        published: the numbers there. Default: none.
        models: what the names of the models end with that it is said of. Default: of all.
    """

    experiment: str
    column: str
    better: Side
    worse: Side
    source: str
    published: str = ""
    models: str = ""


def stated(
    experiment: str,
    source: str,
    columns: Sequence[str],
    numbers: Mapping[Side, Sequence[float | str]],
    pairs: Iterable[tuple[Side, Side]],
    models: str = "",
) -> Iterator[Comparison]:
    """What a published table says in each of its columns.

    Args:
        experiment: name of the experiment.
        source: the table.
        columns: names of columns.
        numbers: by row, its numbers in these columns.
        pairs: rows that the table says are better, each with one that is worse.
        models: see :class:`Comparison`. Default: all.
    """
    for better, worse in pairs:
        for column, high, low in zip(columns, numbers[better], numbers[worse], strict=True):
            said = f"{_written(high)} against {_written(low)}"
            yield Comparison(experiment, column, better, worse, source, said, models)


def _written(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:.2f}"


class Outcome(Enum):
    """What becomes of a comparison; see :class:`Verdict`.

    Example:
        >>> from captum_ssm_bench import Outcome
        >>> [outcome.value for outcome in Outcome]
        ['confirmed', 'refuted here', 'not confirmed', 'not measured here']
    """

    #: The interval of the difference lies on the side of what is said.
    CONFIRMED = "confirmed"
    #: It lies on the other side.
    REFUTED = "refuted here"
    #: It contains 0.
    OPEN = "not confirmed"
    #: There are no results of one of the rows.
    MISSING = "not measured here"


@dataclass(frozen=True)
class Verdict:
    """A comparison, and what was measured.

    Attributes:
        comparison: the comparison.
        model: name of the model.
        outcome: confirmed if the interval of the difference lies on the side of what is said,
            refuted if on the other side, open if it contains 0.
        gain: by how much the row said to be better is better, in the column's unit; a lower number
            is the better one where the column says so.
        examples: how many examples it is made of.
    """

    comparison: Comparison
    model: str
    outcome: Outcome
    gain: Entry
    examples: int


#: By model, with its training, and by example: the numbers of a row.
_Series = Mapping[tuple[str, int, int], Numbers]

_NOTHING = Entry(float("nan"), float("nan"), float("nan"))


def verdicts(
    experiment: Experiment,
    results: Iterable[tuple[Key, Rows]],
    comparisons: Sequence[Comparison],
) -> list[Verdict]:
    """What an experiment's results say of the comparisons that are about it, model by model.

    Args:
        experiment: the experiment.
        results: what was measured, as of :func:`run`.
        comparisons: of any experiments.

    Returns:
        A verdict for each comparison and model.

    Raises:
        OptionError: when a comparison names a column that the experiment does not have.

    Example:
        >>> from captum_ssm_bench import EXPERIMENTS, Comparison, Key, Side, verdicts
        >>> experiment = EXPERIMENTS["decomposition-error"]  # the lower, the better
        >>> results = [
        ...     (Key(experiment.name, "m", "Latim", name, 0, example), {"mean": {"error": error}})
        ...     for name, error in (("linearized", 0.0), ("silu", 0.5)) for example in range(4)]
        >>> better, worse = Side("Latim", "linearized", "mean"), Side("Latim", "silu", "mean")
        >>> said = Comparison(experiment.name, "error", better, worse, source="made up")
        >>> (verdict,) = verdicts(experiment, results, [said])
        >>> verdict.outcome.value, verdict.examples, str(verdict.gain)
        ('confirmed', 4, '0.500 [0.500, 0.500]')
    """
    series = _by_row(results)
    models = sorted({name_of(model) for rows in series.values() for model, _, _ in rows})
    names = models or [subject.name for subject in experiment.subjects()]
    return [
        _verdict(comparison, model, _column(experiment, comparison.column), series)
        for comparison in comparisons
        if comparison.experiment == experiment.name
        for model in names
        if model.endswith(comparison.models)
    ]


def _column(experiment: Experiment, name: str) -> Column:
    for column in experiment.columns:
        if column.name == name:
            return column
    raise OptionError(
        f"The experiment {experiment.name!r} has no column {name!r}. "
        f"Use one of {[column.name for column in experiment.columns]}."
    )


def _by_row(results: Iterable[tuple[Key, Rows]]) -> Mapping[Side, _Series]:
    found: dict[Side, dict[tuple[str, int, int], Numbers]] = {}
    for key, rows in results:
        for row, numbers in rows.items():
            where = Side(key.method, key.formulation, row)
            found.setdefault(where, {})[key.model, key.seed, key.example] = numbers
    return found


def _verdict(
    comparison: Comparison, model: str, column: Column, series: Mapping[Side, _Series]
) -> Verdict:
    sides = comparison.better, comparison.worse
    halved = any(side.row == BEST for side in sides)
    rows = [_rows(side, column, model, series) for side in sides]
    shared = sorted(at for at in rows[0].keys() & rows[1].keys() if not halved or at[2] % 2)
    trainings = sorted({at[0] for at in shared})
    if not trainings:
        return Verdict(comparison, model, Outcome.MISSING, _NOTHING, 0)
    pairs = [
        torch.cat([numbers_of(column, [r[at] for at in shared if at[0] == one]) for r in rows], 1)
        for one in trainings
    ]
    found = interval(gain_of(column), [both_known(pair) for pair in pairs])
    gain = Entry(*(float(part[0]) for part in (found.value, found.low, found.high)))
    return Verdict(comparison, model, _outcome(gain), gain, len(shared))


def _rows(side: Side, column: Column, model: str, series: Mapping[Side, _Series]) -> _Series:
    """What was measured of a row of all trainings of a model; nothing if it was not."""
    found: dict[tuple[str, int, int], Numbers] = {}
    labels = {at[0] for rows in series.values() for at in rows if name_of(at[0]) == model}
    for label in labels:
        own = {
            each: {at: numbers for at, numbers in rows.items() if at[0] == label}
            for each, rows in series.items()
            if each[:2] == side[:2]
        }
        chosen = _best_layer(column, own) if side.row == BEST else side
        found |= own.get(chosen, {}) if chosen is not None else {}
    return found


def _best_layer(column: Column, series: Mapping[Side, _Series]) -> Side | None:
    """The layer of one training that is best in the examples of even number."""
    values: dict[Side, float] = {}
    for each, rows in series.items():
        even = [numbers for at, numbers in rows.items() if at[2] % 2 == 0]
        if even and _LAYER.fullmatch(each.row):
            sample = Sample(column.statistic)
            sample.update(numbers_of(column, even))
            values[each] = float(sample.value()[0])
    known = {each: value for each, value in values.items() if not math.isnan(value)}
    pick = min if column.better == "low" else max
    return pick(known, key=known.__getitem__, default=None)


def both_known(pairs: Tensor) -> Tensor:
    """Pairs (n, 2 k), none of whose numbers count where one of a pair's is missing."""
    first, second = pairs.chunk(2, 1)
    missing = first.isnan() | second.isnan()
    return pairs.masked_fill(torch.cat([missing, missing], 1), float("nan"))


def gain_of(column: Column) -> Statistic:
    """By how much the first half of the numbers is better than the second."""
    sign = -1 if column.better == "low" else 1

    def gain(sums: Tensor, counts: Tensor) -> Tensor:
        first, second = (
            column.statistic(s, c)
            for s, c in zip(sums.chunk(2, -1), counts.chunk(2, -1), strict=True)
        )
        return sign * (first - second)

    return gain


def _outcome(gain: Entry) -> Outcome:
    if gain.low > 0:
        return Outcome.CONFIRMED
    if gain.high < 0:
        return Outcome.REFUTED
    return Outcome.MISSING if math.isnan(gain.value) else Outcome.OPEN
