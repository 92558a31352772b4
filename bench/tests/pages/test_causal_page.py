"""The page of interventions says what was recorded."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from captum_ssm_bench import EXPERIMENTS, Key, Records, Side
from captum_ssm_bench.experiments.causal.experiment import CHOOSING, CONFIRMING

ROOT = Path(__file__).resolve().parents[3]
CAUSAL = EXPERIMENTS["causal"]
MACHINE = {"date": "2020-02-29", "torch": "9.9"}
MODELS = (CHOOSING[0], CONFIRMING[0], CONFIRMING[1])
#: Rows, each with what all of its numbers are about.
ROWS = {
    Side("LatimFlow", "frozen"): 0.25,
    Side("ExpectedGradients", "8 references"): 0.5,
    Side("Shapley values"): 0.7,
}


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("causal", ROOT / "tools" / "causal_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder as ``captum-ssm-bench evaluate causal`` leaves it, of numbers that are drawn."""
    folder = tmp_path / "results"
    records = Records(folder / "causal")
    for model in MODELS:
        for example in range(12):
            for side, about in ROWS.items():
                numbers = {
                    name: about + random.gauss(0, 0.01)
                    for column in CAUSAL.columns
                    for name in column.numbers
                }
                records.append(Key("causal", model, *side[:2], 0, example), {"": numbers})
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    return folder


def test_the_page_of_some_results(tool: Any, results: Path, tmp_path: Path) -> None:
    tool.main(results, tmp_path)
    page = (tmp_path / tool.PAGE).read_text(encoding="utf-8")
    assert "Made on 2020-02-29 with torch 9.9." in page
    choice = (tmp_path / tool.CHOICE).read_text(encoding="utf-8")
    assert "### choosing (1 model), 12 examples" in choice and "### choosing" not in page
    assert "### confirming (2 models), 24 examples" in page
    assert "- 0.91 on confirming (2 models)" in page, "the root of 2 * .7 / 1.7"
    said, gained = (part.split("\n### ") for part in page.split("gain over Expected")[:2])
    confirming = next(part for part in said if part.startswith("confirming"))
    order = re.findall(r"^\| (\w[\w ,]*) \| 0\.", confirming, re.MULTILINE)
    assert order == ["Shapley values", "ExpectedGradients, 8 references", "LatimFlow, frozen"]
    assert re.search(r"\| LatimFlow, frozen \| -0\.2\d+ \[", gained[1])
    assert not any(part.startswith("choosing") for part in gained)
    for model, kind in ((CHOOSING[0], "choosing"), (CONFIRMING[0], "confirming")):
        numbers = re.search(rf"\| {model} \| \w+ \| {kind} \| ([\d. |]+) \|\n", page)
        assert numbers is not None
        found = [float(number) for number in numbers[1].split(" | ")]
        assert found == pytest.approx([0.5, 0.25, 0.7], abs=0.025)
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block
    picture = (tmp_path / tool.PICTURE).read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_the_shipped_page_says_what_its_tables_say(tool: Any) -> None:
    pages = [
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in (tool.PAGE, tool.CHOICE)
    ]
    with (ROOT / "docs" / tool.TABLES / "causal.csv").open(encoding="utf-8") as file:
        table = {
            (row["model"], row["method"], row["formulation"]): row for row in csv.DictReader(file)
        }
    assert {name for group in CAUSAL.groups.values() for name in group} <= {at[0] for at in table}
    tables = "".join(page.partition("gain over")[0] for page in pages)
    parts = re.split(r"^### ", tables, flags=re.MULTILINE)[1:]
    assert len(parts) == len(CAUSAL.groups)
    for part in parts:
        group = part.partition("), ")[0] + ")"
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in part.splitlines()
            if line.startswith("|")
        )
        assert len(rows) > 10
        for cells in rows:
            method, _, formulation = cells[0].partition(", ")
            entry = table[group, method, formulation]
            for column, said in list(zip(head, cells, strict=True))[1:]:
                precision = 0.51 if column == tool.PASSES else 5.1e-4
                value = float(said.split()[0])
                assert value == pytest.approx(float(entry[column]), abs=precision), (group, cells)
    assert (ROOT / "docs" / tool.PICTURE).stat().st_size < 100_000
