"""What ``bench/REGISTERED.md`` decides from the records of ``fresh``: the default rule, and claims.

``python -m captum_ssm_bench.experiments.causal.decision RESULTS`` prints the decision, and writes
tables there, which ``keep_tables.py`` keeps.
A model is one sample: its number is the mean over its examples; intervals are drawn over models.

Shapes: M models.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm.metrics.sample import Interval, mean

from ...harness.experiment import Cell
from ...harness.records import Records
from ...harness.statistics import interval
from ...training.fresh import stored
from .fresh import BASELINE, ROWS, Fresh

#: Columns by the names that records and the table give them.
COLUMNS = {
    "spearman": "ρ",
    "pearson": "r",
    "insertion": "insertion",
    "top1": "source first",
    "off_the_sum": "error of the sum",
}
#: The column that the error of the sum is a share of.
_SIZE = "size_of_the_sum"
#: Rows with at least this share of the best source first may become the default.
_SHARE = 0.9
#: "Not below" needs a lower bound of at least this.
_NOT_BELOW = -0.02
_FLOW = "LatimFlow"
_BALANCED = Cell(_FLOW, "balanced, own mean")

#: By column, each row's number of every model, (M,); models in one order.
Numbers = Mapping[str, Mapping[Cell, Tensor]]


class Claim(NamedTuple):
    """A registered comparison of the default: with which row, in which column, and its result."""

    other: Cell
    column: str
    needed: float
    found: Interval

    @property
    def holds(self) -> bool:
        """Whether the lower bound is as high as needed; above 0 for "better"."""
        return float(self.found.low) >= self.needed


def read(folder: str | Path, *, with_bytes: bool = False) -> Numbers:
    """Return the numbers of each model; models that lack a row are left out.

    The model of bytes (part D) is one model, whatever mechanisms it answers.
    """
    found: dict[str, dict[Cell, dict[str, list[float]]]] = {name: {} for name in (*COLUMNS, _SIZE)}
    for experiment in ("fresh", "bytes")[: 1 + with_bytes]:
        for key, rows in Records(Path(folder) / experiment):
            for name, cells in found.items():
                cell = cells.setdefault(Cell(key.method, key.formulation), {})
                model = key.model if experiment == "fresh" else experiment
                cell.setdefault(model, []).append(rows[""][name])
    known = (*stored(), "bytes")
    models = [m for m in known if all(m in found["spearman"].get(row, {}) for row in ROWS)]
    numbers = {
        name: {
            row: torch.tensor([fmean(cells[row][m]) for m in models], dtype=torch.float64)
            for row in ROWS
        }
        for name, cells in found.items()
    }
    sizes, errors = numbers.pop(_SIZE), numbers["off_the_sum"]
    return {**numbers, "off_the_sum": {row: errors[row] / sizes[row] for row in ROWS}}


def over_models(values: Tensor) -> Interval:
    """Return the mean of one number per model (M,), with its interval over models."""
    return interval(mean, [values[:, None]])


def default_rule(numbers: Numbers) -> Cell:
    """Return the row that becomes the default, by rules 1 to 3 of the registration."""
    first, rho = numbers["top1"], numbers["spearman"]
    able = [r for r in ROWS if r.method == _FLOW and "kinds" not in r.formulation and _two(r)]
    best = max(float(first[r].mean()) for r in able)
    left = [r for r in able if float(first[r].mean()) >= _SHARE * best]
    chosen = max(left, key=lambda r: float(rho[r].mean()))
    tied = [r for r in left if float(over_models(rho[chosen] - rho[r]).low) <= 0]
    return max(tied, key=lambda r: float(first[r].mean()))


def _two(row: Cell) -> bool:
    return ROWS[row].forward + ROWS[row].backward == 2


def claims(numbers: Numbers, default: Cell) -> list[Claim]:
    """Return the registered comparisons of the default."""
    few, many = (Cell("ExpectedGradients", f"{n} references") for n in (8, 32))
    asked = [
        (BASELINE, "spearman", 0.0),
        *((few, column, _NOT_BELOW) for column in ("spearman", "pearson", "insertion")),
        (many, "top1", 0.0),
    ]
    return [
        Claim(other, column, needed, over_models(numbers[column][default] - numbers[column][other]))
        for other, column, needed in asked
    ]


def offered(numbers: Numbers, default: Cell) -> Mapping[str, Interval]:
    """Return by how much the row with ExpectedGradients exceeds the default in ρ and r."""
    row = Cell(_FLOW, "balanced, with ExpectedGradients")
    return {c: over_models(numbers[c][row] - numbers[c][default]) for c in ("spearman", "pearson")}


def write(numbers: Numbers, folder: Path) -> None:
    """Write tables as ``evaluate`` does: each row's means, and its gains over two of them."""
    _write(numbers, folder / "fresh-models.csv")
    for name, other in (("fresh-models-against", BASELINE), ("fresh-rules", _BALANCED)):
        gains = {c: {r: x - rows[other] for r, x in rows.items()} for c, rows in numbers.items()}
        _write(gains, folder / f"{name}.csv")


def _write(numbers: Numbers, path: Path) -> None:
    names = [f"{name}{end}" for name in COLUMNS.values() for end in ("", " low", " high")]
    models = len(numbers["top1"][BASELINE])
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "method", "formulation", "row", "examples", *names])
        for row in ROWS:
            found = (_cells(over_models(numbers[column][row])) for column in COLUMNS)
            own = (x for each in found for x in each)
            table.writerow([f"fresh ({models} models)", *row, "", models * Fresh.examples, *own])


def _cells(found: Interval) -> list[str]:
    return [f"{float(x):.6g}" for x in (found.value, found.low, found.high)]


def main(folder: Path) -> None:
    """Print the decision of a folder of results and write its table; last, with part D."""
    numbers = read(folder)
    write(numbers, folder)
    for each in (numbers, read(folder, with_bytes=True)):
        _say(each)


def _say(numbers: Numbers) -> None:
    default = default_rule(numbers)
    print(f"{len(numbers['top1'][default])} models. Default: {', '.join(default)}.")
    for claim in claims(numbers, default):
        said = f"{_cells(claim.found)}, {'holds' if claim.holds else 'fails'}"
        print(f"- {COLUMNS[claim.column]}, minus that of {', '.join(claim.other)}: {said}")
    for column, found in offered(numbers, default).items():
        print(f"- with ExpectedGradients, {COLUMNS[column]}: {_cells(found)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
