"""The page of whole answers says what was recorded."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS, Key, Records
from captum_ssm_bench.harness.records import Numbers

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("answers", ROOT / "tools" / "answers_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(page: str) -> list[list[str]]:
    """The cells of all tables, heads left out."""
    found = [
        line for line in page.splitlines() if re.match(r"\| [\w-]+-(mamba|gated|rwkv|gri)", line)
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


def record(
    folder: Path, name: str, model: str, cell: tuple[str, str], given: dict[str, Numbers]
) -> None:
    """Ten examples, all alike but that every second one has nothing of what is not given."""
    records = Records(folder / name)
    needed = {number for column in EXPERIMENTS[name].columns for number in column.numbers}
    for example in range(10):
        rest = dict.fromkeys(needed, float(example % 2))
        rows = {row: {**rest, **numbers} for row, numbers in given.items()}
        records.append(Key(name, model, *cell, 0, example), rows)


def test_the_page_of_some_results(tool: Any, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    for rule, order in (("half", 1.0), ("centred", 0.75), ("frozen", 0.25)):
        given = {
            f"{questions}, {reading}": {"order": order if reading == "by hops" else 0.125}
            for questions in ("one question", "two questions")
            for reading in ("by hops", "last word alone", "all words, summed")
        }
        record(folder, "answers", "chains-mamba", ("LatimFlow", rule), given)
    first = {"layer 0": {"first": 0.375}}
    record(folder, "erasers", "pairs-mamba", ("taken out", ""), first)
    read: dict[str, Numbers] = {"read, layer 0": {}}
    record(folder, "forgotten-passkeys", "passkey-mamba", ("StateMemory", ""), read)
    (folder / "machine.json").write_text(json.dumps({"date": "2020-02-29", "torch": "9.9"}))
    tool.main(folder, tmp_path)
    page = (tmp_path / tool.PAGE).read_text(encoding="utf-8")
    assert "Made on 2020-02-29 with torch 9.9." in page
    told = " ".join(page.split())
    assert "in their order in 0.750 to 1.000 of the texts" in told
    assert "they do not:** 0.250 to 0.250" in told
    assert "is so in 0.375 to 0.375 of the texts" in told
    assert len(rows(page)) == 3 * 2 * 3 + 1 + 1


def test_the_shipped_page_says_what_its_tables_say(tool: Any) -> None:
    said = iter(rows((ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8")))
    for name in tool.NAMES:
        with (ROOT / "docs" / tool.TABLES / f"{name}.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                entries = next(said)
                assert entries[0] == row["model"] and int(row["examples"]) >= 100
                columns = EXPERIMENTS[name].columns
                for column, entry in zip(columns, entries[-len(columns) :], strict=True):
                    value = float(re.sub("^-$", "nan", entry.partition(" ")[0]))
                    expected = pytest.approx(float(row[column.name]), abs=5.1e-4, nan_ok=True)
                    assert value == expected, row
    assert next(said, None) is None
