"""The tables that pages read say what was recorded."""

from __future__ import annotations

import csv
import json
import random
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS, Key, Records, lines
from captum_ssm_bench.harness.tables import Side, as_csv

MACHINE = {"date": "2020-02-29", "torch": "9.9"}
#: Rows of the copying table; each with the expected share of right tokens.
ROWS = {
    Side("LatimFlow", "frozen"): 0.9,
    Side("MambaLRP", "half"): 0.7,
    Side("LatimNorm l2", "silu", "layer 0"): 0.2,
    Side("LatimNorm l2", "silu", "layer 1"): 0.5,
    Side("ImplicitAttention", "s6", "layer 0"): 0.1,
    Side("ImplicitAttention", "s6", "layer 1"): 0.6,
}


@pytest.fixture
def tables() -> Any:
    """The script."""
    place = Path(__file__).parents[1] / "keep_tables.py"
    spec = spec_from_file_location("keep_tables", place)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder as ``captum-ssm-bench evaluate`` leaves it, of numbers that are drawn."""
    folder = tmp_path / "results"
    records = Records(folder / "copying")
    for example in range(30):
        for method, formulation in {side[:2] for side in ROWS}:
            rows = {
                side.row: numbers(share + random.gauss(0, 0.02))
                for side, share in ROWS.items()
                if side[:2] == (method, formulation)
            }
            key = Key("copying", "copying-mamba", method, formulation, 0, example)
            records.append(key, rows)
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    return folder


def numbers(share: float) -> dict[str, float]:
    hits = round(10 * share)
    links = {"predicted": 10.0, "sure": 10.0, "hit_sure": hits, "hit_possible": hits}
    return {"auc": share, "ap": share, "recall": share, "top1": share, **links}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_what_was_recorded_is_kept_and_judged(tables: Any, results: Path, tmp_path: Path) -> None:
    tables.main(results, tmp_path)
    kept = tmp_path / "results" / "copying.csv"
    copying = EXPERIMENTS["copying"]
    assert kept.read_text() == as_csv(copying, lines(copying, Records(results / "copying")))
    judged = {
        (row["source"], row["better"], row["worse"], row["column"]): row["verdict"]
        for row in read(tmp_path / "results" / "orderings.csv")
    }
    # published: l2 beats Mamba-Attention and MambaLRP; here it is below both
    norm, attention = "LatimNorm l2, silu, best layer", "ImplicitAttention, s6, best layer"
    assert judged["LATIM, table 2", norm, attention, "AP"] == "refuted here"
    assert judged["", "LatimFlow, frozen", "MambaLRP, half", "top 1"] == "confirmed"
    assert json.loads((tmp_path / "results" / "measured.json").read_text()) == {"copying": MACHINE}


def test_other_trainings_have_tables(tables: Any, results: Path, tmp_path: Path) -> None:
    again = Records(results / "trainings" / "copying")
    for key, rows in Records(results / "copying"):
        for model in (key.model, f"{key.model}@1"):
            again.append(key._replace(model=model), rows)
    tables.main(results, tmp_path)
    counted = {
        (x["trainings"], x["examples"]) for x in read(tmp_path / "results/again-copying.csv")
    }
    assert counted == {("2", "60")}
    assert {(x["trainings"], x["examples"]) for x in read(tmp_path / "results/copying.csv")} == {
        ("1", "30")
    }


def test_groups_are_kept_as_the_command_wrote_them(
    tables: Any, results: Path, tmp_path: Path
) -> None:
    (results / "causal-against.csv").write_text("as it was")
    tables.main(results, tmp_path / "docs")
    assert (tmp_path / "docs" / "results" / "causal-against.csv").read_text() == "as it was"
    assert "causal-against" in (tmp_path / "docs" / "results" / "measured.json").read_text()


def test_tables_of_other_experiments_stay(tables: Any, results: Path, tmp_path: Path) -> None:
    tables.main(results, tmp_path)
    orderings = tmp_path / "results" / "orderings.csv"
    other = {**read(orderings)[0], "experiment": "passkey", "better": "this", "worse": "that"}
    tables.write(orderings, [other, *read(orderings)])
    (tmp_path / "results" / "passkey.csv").write_text("as it was")
    before = read(orderings)
    tables.main(results, tmp_path)
    assert read(orderings) == before and before[-1] == other
    assert (tmp_path / "results" / "passkey.csv").read_text() == "as it was"
