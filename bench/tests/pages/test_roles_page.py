"""The page of counted roles says what was recorded."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS, Cell, Key, Records

ROOT = Path(__file__).resolve().parents[3]
ROLES = EXPERIMENTS["roles"]
#: How many of ten examples are right, by model, where the rule gives something to the role.
MODELS = {"passkey-mamba": 8, "passkey-mamba2": 4, "pairs-mamba": 10}
CENTRED, FROZEN = Cell("LatimFlow", "centred"), Cell("LatimFlow", "frozen")


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("roles", ROOT / "tools" / "roles_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(page: str) -> Mapping[tuple[str, str], list[str]]:
    """What the tables of results say, by model and rule."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.match(r"\| [\w() -]+ \| \d+ \|", line)
    ]
    found = {(model, rule): entries for model, _, rule, *entries in cells}
    assert len(found) == len(cells), "no row twice"
    return found


def test_the_page_of_some_results(tool: Any, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    records = Records(folder / "roles")
    for model, right in MODELS.items():
        for example in range(10):
            for cell in (CENTRED, FROZEN):
                asked = float(example < right) if cell == CENTRED else float("nan")
                numbers = {"query": asked, "key": asked, "content": 1.0}
                records.append(Key("roles", model, *cell, 0, example), {"": numbers})
    (folder / "machine.json").write_text(json.dumps({"date": "2020-02-29", "torch": "9.9"}))
    tool.main(folder, tmp_path)
    page = (tmp_path / tool.PAGE).read_text(encoding="utf-8")
    assert "Made on 2020-02-29 with torch 9.9." in page
    found = rows(page)
    assert list(found)[-6:] == [
        (model, rule)
        for model in ("pairs-mamba", "passkey-mamba", "passkey-mamba2")
        for rule in ("centred", "frozen")
    ]
    for (model, rule), share in {
        ("passkey (2 models)", "centred"): "0.600",
        ("recall (1 model)", "centred"): "1.000",
        ("passkey-mamba2", "centred"): "0.400",
    }.items():
        query, key, content = found[model, rule]
        assert query == key and query.startswith(f"{share} [")
        assert content == "1.000 [1.000, 1.000]"
    assert found["passkey-mamba", "frozen"] == ["-", "-", "1.000 [1.000, 1.000]"]


def test_the_shipped_page_says_what_its_table_says(tool: Any) -> None:
    with (ROOT / "docs" / tool.TABLES / "roles.csv").open(encoding="utf-8") as file:
        table = {
            (row["model"], row["formulation"] or row["method"]): row for row in csv.DictReader(file)
        }
    found = rows((ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8"))
    assert len(found) == len(table)
    named = {name for group in ROLES.groups.values() for name in group}
    assert named < {model for model, _ in found}
    for (model, rule), entries in found.items():
        row = table[model, rule]
        assert int(row["examples"]) >= 100
        for column, said in zip(ROLES.columns, entries, strict=True):
            value = float(said.partition(" ")[0].replace("-", "nan"))
            expected = pytest.approx(float(row[column.name]), abs=5.1e-4, nan_ok=True)
            assert value == expected, (model, rule)
