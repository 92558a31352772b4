"""Keep the records of ``evaluate`` as the tables that the pages of results read.

Usage: python bench/keep_tables.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` and DOCS the one to write to; by default that of this checkout.  In RESULTS/trainings may
lie the records of several trainings of each model, made with ``--models``.  Of experiments that
RESULTS does not hold, tables stay as they are.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

from captum_ssm_bench import EXPERIMENTS, Records, Verdict, lines, verdicts
from captum_ssm_bench.harness.tables import as_csv
from captum_ssm_bench.published import ASKED_HERE, PUBLISHED

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLES, MEASURED, ORDERINGS = "results", "measured.json", "orderings"
#: The beginning of the names of the tables of several trainings.
AGAIN = "again-"
#: Experiments whose tables are kept as the command writes them, with groups of models.
AS_WRITTEN = (
    *("causal", "causal-against", "roles", "knockout", "hybrid-parts", "graphs"),
    *("answers", "erasers", "forgotten-passkeys"),
)


def main(folder: Path, docs: Path = DOCS) -> None:
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    place = docs / TABLES
    place.mkdir(parents=True, exist_ok=True)
    known = place / MEASURED
    measured = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    for begin, of in (("", folder), (AGAIN, folder / "trainings")):
        rows = read(place / f"{begin}{ORDERINGS}.csv")
        for name, experiment in EXPERIMENTS.items():
            if name in AS_WRITTEN or not (of / name).is_dir():
                continue
            if found := list(Records(of / name)):
                table = as_csv(experiment, lines(experiment, found))
                (place / f"{begin}{name}.csv").write_text(table, encoding="utf-8")
                measured[f"{begin}{name}"] = machine
                judged = verdicts(experiment, found, (*PUBLISHED, *ASKED_HERE))
                rows = [row for row in rows if row["experiment"] != name]
                rows += map(row_of, judged)
        write(place / f"{begin}{ORDERINGS}.csv", rows)
    for name in AS_WRITTEN:
        if (folder / f"{name}.csv").exists():
            shutil.copy(folder / f"{name}.csv", place)
            measured[name] = machine
    known.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def row_of(verdict: Verdict) -> dict[str, str]:
    """What became of the statement that one row is better than another, on one model."""
    said, gain = verdict.comparison, verdict.gain
    return {
        "experiment": said.experiment,
        "source": "" if said in ASKED_HERE else said.source,
        "model": verdict.model,
        "better": str(said.better),
        "worse": str(said.worse),
        "column": said.column,
        "published": said.published,
        **{name: f"{x:.6g}" for name, x in zip(("gain", "low", "high"), gain, strict=True)},
        "verdict": verdict.outcome,
    }


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """The table, those of an experiment together, in their order; no file where there are none."""
    order = list(EXPERIMENTS)
    rows = sorted(rows, key=lambda row: order.index(row["experiment"]))
    if rows:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
