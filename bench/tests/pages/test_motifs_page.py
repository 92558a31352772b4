"""The page of motifs says what was recorded."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS, Cell, Key, Records

ROOT = Path(__file__).resolve().parents[3]
MOTIFS = EXPERIMENTS["motifs"]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("motifs", ROOT / "tools" / "motifs_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_some_results(tool: Any, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    records = Records(folder / "motifs")
    for example in range(4):
        for cell, ap in ((Cell("LatimFlow", "centred"), 0.75), (Cell("Gradient"), 0.25)):
            numbers = {"ap": ap, "pointing": 1.0, "positions": 0.5, "variants": 0.125}
            records.append(Key("motifs", "motifs-caduceus", *cell, 0, example), {"": numbers})
    (folder / "machine.json").write_text(json.dumps({"date": "2020-02-29", "torch": "9.9"}))
    tool.main(folder, tmp_path)
    page = (tmp_path / tool.PAGE).read_text(encoding="utf-8")
    assert "Made on 2020-02-29 with torch 9.9." in page
    row = "| motifs-caduceus | 4 | LatimFlow, centred | 0.750 [0.750, 0.750] | 1.000"
    assert row in page and "| Gradient | 0.250 [0.250, 0.250] |" in page


def shipped() -> dict[tuple[str, str], dict[str, float]]:
    """The numbers on the page's table, by model and method."""
    path = ROOT / "docs" / "results" / "motifs.csv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = [column.name for column in MOTIFS.columns]
    return {
        (row["model"], row["formulation"] or row["method"]): {n: float(row[n]) for n in numbers}
        for row in rows
    }


def test_what_the_page_says_is_in_its_table(tool: Any) -> None:
    page = (ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8")
    assert tool.SAYS.rstrip() in page
    found = shipped()
    models = {model for model, _ in found}
    assert models == {"motifs-caduceus", "motifs-hyenadna"}
    estimates = ("frozen", "half", "equal", "centred", "Gradient", "IntegratedGradients")
    for model in models:
        best = max(
            ("frozen", "half", "equal", "centred"), key=lambda r: found[model, r]["variants"]
        )
        assert found[model, "centred"]["variants"] >= found[model, best]["variants"] - 0.02
        assert all(found[model, each]["variants"] < 0.8 for each in estimates)
