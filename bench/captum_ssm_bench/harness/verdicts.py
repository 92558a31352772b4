"""Which of two rows of a table is better, and whether that is what was published.

A comparison is decided from paired differences: both rows are measured on the same examples, which
are drawn anew together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from captum_ssm.metrics.sample import Sample

from .experiment import Column, Experiment
from .records import Key, Rows
from .statistics import interval
from .tables import Entry, Models, Side, gain_of, numbers_of, paired, series_of

#: In place of a row: of the method's layers the one that is best in every second example; the
#: comparison is then made on the other examples, so that the choice favors nobody.
BEST = "best layer"

_LAYER = re.compile(r"layer \d+")


class Comparison(NamedTuple):
    """A row that is said to be better than another.

    Attributes:
        experiment: name of the experiment.
        column: name of a column of its table.
        better: the row said to be better.
        worse: the other one.
        source: who says so.
        published: the numbers there. Default: none.
        models: how the names of the models end that it is said of. Default: of all.
    """

    experiment: str
    column: str
    better: Side
    worse: Side
    source: str
    published: str = ""
    models: str = ""


class Verdict(NamedTuple):
    """A comparison, and the result of measuring it.

    Attributes:
        comparison: the comparison.
        model: name of the model.
        outcome: ``"confirmed"`` if the interval of the difference lies on the side of the
            statement, ``"refuted here"`` if on the other, ``"not confirmed"`` if it contains 0.
        gain: by how much the row said to be better is better, in the column's unit; a lower number
            is the better one where the column says so.
        examples: how many examples it is made of.
    """

    comparison: Comparison
    model: str
    outcome: str
    gain: Entry
    examples: int


def verdicts(
    experiment: Experiment,
    results: Iterable[tuple[Key, Rows]],
    comparisons: Iterable[Comparison],
) -> Iterator[Verdict]:
    """The verdict on each comparison of an experiment, for each model that both rows are known of.

    Args:
        experiment: the experiment.
        results: the records, as of :func:`run`.
        comparisons: of any experiments.

    Example:
        >>> from captum_ssm_bench import EXPERIMENTS, Comparison, Key, Side, verdicts
        >>> experiment = EXPERIMENTS["decomposition-error"]  # the lower, the better
        >>> results = [
        ...     (Key(experiment.name, "m", "Latim", name, 0, example), {"mean": {"error": error}})
        ...     for name, error in (("linearized", 0.0), ("silu", 0.5)) for example in range(4)]
        >>> better, worse = Side("Latim", "linearized", "mean"), Side("Latim", "silu", "mean")
        >>> said = Comparison(experiment.name, "error", better, worse, source="made up")
        >>> (verdict,) = verdicts(experiment, results, [said])
        >>> verdict.outcome, verdict.examples, str(verdict.gain)
        ('confirmed', 4, '0.500 [0.500, 0.500]')
    """
    series = series_of(results)
    columns = {column.name: column for column in experiment.columns}
    names = sorted({name for models in series.values() for name in models})
    for said in comparisons:
        if said.experiment == experiment.name:
            column, sides = columns[said.column], (said.better, said.worse)
            halved = any(side.row == BEST for side in sides)
            for name in (name for name in names if name.endswith(said.models)):
                both = paired(*(_of_side(side, column, name, series) for side in sides))
                trainings = [
                    {at: one for at, one in sorted(each.items()) if not halved or at[1] % 2}
                    for _, each in sorted(both.get(name, {}).items())
                ]
                numbers = [numbers_of(column, each.values()) for each in trainings if each]
                if numbers:
                    gain = Entry.of(interval(gain_of(column), numbers))
                    if not math.isnan(gain.value):
                        yield Verdict(said, name, _outcome(gain), gain, sum(map(len, numbers)))


def _of_side(side: Side, column: Column, name: str, series: Mapping[Side, Models]) -> Models:
    """The examples of a row of one model; of each training those of its best layer, if asked."""
    if side.row != BEST:
        return {name: series.get(side, {}).get(name, {})}
    own = {each: models[name] for each, models in series.items() if name in models}
    layers = [each for each in own if each[:2] == side[:2] and _LAYER.fullmatch(each.row)]
    found, pick = {}, min if column.better == "low" else max
    for label in {label for each in layers for label in own[each]}:
        values = {}
        for layer in (each for each in layers if label in own[each]):
            even = [one for at, one in own[layer][label].items() if at[1] % 2 == 0]
            sample = Sample(column.statistic)
            if even:
                sample.update(numbers_of(column, even))
                values[layer] = float(sample.value()[0])
        known = [layer for layer, value in values.items() if not math.isnan(value)]
        if known:
            found[label] = own[pick(known, key=values.__getitem__)][label]
    return {name: found}


def _outcome(gain: Entry) -> str:
    return "confirmed" if gain.low > 0 else "refuted here" if gain.high < 0 else "not confirmed"
