"""The best rows of a table: what is printed, and shown on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .experiment import Experiment
from .tables import Line, labels_of, sample_size

#: Rows of each model.
ROWS = 12


def excerpt(experiment: Experiment, table: Iterable[Line]) -> list[Line]:
    """The best lines of one model, and those of baselines, wherever they are.

    Args:
        experiment: whose table it is.
        table: its lines of one model.

    Returns:
        Of the rows of :func:`best_rows` the first :data:`ROWS`, and the baselines among the others.
        Where neither high nor low is better, the means over layers, and all rows if there are none.
    """
    if not experiment.columns[0].better:
        found = list(table)
        return [line for line in found if line.row.startswith("mean")] or found
    best = best_rows(experiment, table)
    return best[:ROWS] + [line for line in best[ROWS:] if line.method in experiment.baselines]


def best_rows(experiment: Experiment, table: Iterable[Line]) -> list[Line]:
    """Of each method and formulation the row that is best by the first column, the best first.

    Args:
        experiment: whose table it is.
        table: its lines of one model.
    """
    column = experiment.columns[0]
    sign = 1 if column.better == "low" else -1

    def badness(line: Line) -> float:
        value = line.entries[column.name].value
        return math.inf if math.isnan(value) else sign * value

    best: dict[tuple[str, str], Line] = {}
    for line in sorted(table, key=badness):
        best.setdefault((line.method, line.formulation), line)
    return list(best.values())


def as_text(experiment: Experiment, table: Sequence[Line]) -> str:
    """The excerpt of each model without intervals, for a terminal.

    Args:
        experiment: whose table it is.
        table: its lines.

    Example:
        >>> from captum_ssm_bench import EXPERIMENTS, Key, lines
        >>> from captum_ssm_bench.harness.excerpt import as_text
        >>> experiment = EXPERIMENTS["decomposition-error"]
        >>> keys = [Key(experiment.name, "m", "Latim", name, 0, 0) for name in ("silu", "relu")]
        >>> results = [(key, {"mean": {"error": 1 / (3 + i)}}) for i, key in enumerate(keys)]
        >>> print(as_text(experiment, lines(experiment, results)).partition(chr(10))[2])
        m, 1 examples
          method  formulation  row   error
          Latim   relu         mean  0.250
          Latim   silu         mean  0.333
    """
    parts = [experiment.title]
    for model in sorted({line.model for line in table}):
        own = [line for line in table if line.model == model]
        labels = labels_of(own)
        rows = [[*labels, *(column.name for column in experiment.columns)]]
        for line in excerpt(experiment, own):
            values = (str(entry).partition(" ")[0] for entry in line.entries.values())
            rows.append([*(getattr(line, name) for name in labels), *values])
        parts += [f"{model}, {sample_size(own)}", *(f"  {row}" for row in _aligned(rows))]
    return "\n".join(parts)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
