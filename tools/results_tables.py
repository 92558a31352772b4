"""Keep what ``evaluate`` recorded as the tables that the pages of results are made of.

Usage: python tools/results_tables.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` and DOCS the one to write to; by default that of this checkout.  In RESULTS/trainings may
lie what was recorded of several trainings of each model, with ``--models``.  Of experiments that
RESULTS does not hold, tables stay as they are; ``python tools/results_page.py`` makes the pages.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from captum_ssm_bench import EXPERIMENTS, Experiment, Line, Records, lines
from captum_ssm_bench.harness.runner import Result
from captum_ssm_bench.harness.tables import Entry, as_csv
from captum_ssm_bench.harness.verdicts import Comparison, Outcome, Verdict, verdicts
from captum_ssm_bench.published.beyond import BEYOND
from captum_ssm_bench.published.on_images import IMAGES
from captum_ssm_bench.published.on_texts import TEXTS
from captum_ssm_bench.published.on_tokens import TOKENS

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLES, MEASURED, ORDERINGS = "results", "measured.json", "orderings"
#: What begins the names of the tables of several trainings.
AGAIN = "again-"
#: Experiments whose pages other tools make.
OWN_PAGES = (
    "causal",
    "roles",
    "knockout",
    "hybrid-parts",
    "graphs",
    "answers",
    "erasers",
    "forgotten-passkeys",
    "motifs",
)
PUBLISHED = (*TOKENS, *TEXTS, *IMAGES)

Results = Mapping[str, Sequence[Result]]


@dataclass(frozen=True)
class Judged:
    """What became of the statement that one row is better than another, on one model.

    Attributes:
        experiment, model, column: where it was measured, and by what.
        source: the table that says so; empty for what no paper has asked.
        better, worse: the rows.
        published: the numbers there.
        gain, low, high: by how much the one is better, with its interval.
        verdict: confirmed, refuted here or not confirmed.
    """

    experiment: str
    source: str
    model: str
    better: str
    worse: str
    column: str
    published: str
    gain: float
    low: float
    high: float
    verdict: str

    @property
    def entry(self) -> Entry:
        """The gain with its interval."""
        return Entry(self.gain, self.low, self.high)


def main(folder: Path, docs: Path = DOCS) -> None:
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    place = docs / TABLES
    place.mkdir(parents=True, exist_ok=True)
    known = place / MEASURED
    measured = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    for begin, of in (("", folder), (AGAIN, folder / "trainings")):
        results = recorded(of)
        for name, found in results.items():
            table = as_csv(EXPERIMENTS[name], lines(EXPERIMENTS[name], found))
            (place / f"{begin}{name}.csv").write_text(table, encoding="utf-8")
            measured[f"{begin}{name}"] = machine
        path = place / f"{begin}{ORDERINGS}.csv"
        stays = [each for each in judged(path) if each.experiment not in results]
        write_judged(path, [*stays, *judgements(results, PUBLISHED), *judgements(results, BEYOND)])
    known.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def recorded(folder: Path) -> Results:
    """What was measured of each experiment, in their order, but for those with their own pages."""
    names = [name for name in EXPERIMENTS if name not in OWN_PAGES and (folder / name).is_dir()]
    known = {name: list(Records(folder / name)) for name in names}
    return {name: found for name, found in known.items() if found}


def judgements(results: Results, comparisons: Sequence[Comparison]) -> list[Judged]:
    """What becomes of all comparisons of experiments that were run."""
    return [
        _judged(verdict)
        for name, measured in results.items()
        for verdict in verdicts(EXPERIMENTS[name], measured, comparisons)
        if verdict.outcome is not Outcome.MISSING
    ]


def _judged(verdict: Verdict) -> Judged:
    said, gain = verdict.comparison, verdict.gain
    return Judged(
        said.experiment,
        said.source if said in PUBLISHED else "",
        verdict.model,
        str(said.better),
        str(said.worse),
        said.column,
        said.published,
        gain.value,
        gain.low,
        gain.high,
        verdict.outcome.value,
    )


def judged(path: Path) -> list[Judged]:
    """Those of a table; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = ("gain", "low", "high")
    return [Judged(**{k: float(v) if k in numbers else v for k, v in row.items()}) for row in rows]


def write_judged(path: Path, found: Iterable[Judged]) -> None:
    """The table, those of an experiment together, in their order; no file where there are none."""
    order = list(EXPERIMENTS)
    rows = sorted(map(asdict, found), key=lambda row: order.index(row["experiment"]))
    if not rows:
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def read_lines(experiment: Experiment, path: Path) -> list[Line]:
    """The lines of a table that was written as csv.

    Args:
        experiment: whose columns it has.
        path: of the file.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def entries(row: Mapping[str, str]) -> dict[str, Entry]:
        names = [column.name for column in experiment.columns]
        return {
            n: Entry(*(float(row[f"{n}{end}"]) for end in ("", " low", " high"))) for n in names
        }

    return [
        Line(
            row["model"],
            row["method"],
            row["formulation"],
            row["row"],
            int(row["trainings"]),
            int(row["examples"]),
            entries(row),
        )
        for row in rows
    ]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
