"""The page of graphs says what was recorded."""

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

from captum_ssm_bench import EXPERIMENTS, Key, Records
from captum_ssm_bench.experiments.knockout.graphs import (
    DIRECT_CUT,
    OF_NODES,
    PATH,
    SOURCES_CUT,
    WHOLE,
)

ROOT = Path(__file__).resolve().parents[3]
GRAPHS = EXPERIMENTS["graphs"]
MODELS = ("pairs-mamba", "passkey-mamba")


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("graphs", ROOT / "tools" / "graphs_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(page: str, head: str) -> list[list[list[str]]]:
    """The cells of all tables that begin so."""
    tables = re.findall(rf"^\| {re.escape(head)}[^\n]*\n\|[ -|]+\n((?:\|[^\n]*\n)+)", page, re.M)
    assert tables, head
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in tables
    ]


def test_the_page_of_some_results(tool: Any, tmp_path: Path) -> None:
    """Of four texts: without paths one answer is left, and r of nodes is 1, but -1 by one rule."""
    records = Records(tmp_path / GRAPHS.name)
    unknown = {name: float("nan") for column in GRAPHS.columns for name in column.numbers}
    for model in MODELS:
        for example in range(4):
            for cell in GRAPHS.cells():
                right = float(cell == WHOLE or (cell.method == PATH and example == 0))
                path = {"token": 1.0, "place": 0.5, "right": right, "others": 0.75, "messages": 2.0}
                sign = -1.0 if cell.formulation == "half" else 1.0
                nodes = {"n": 2.0, "x": 0.0, "y": 0.0, "xx": 2.0, "yy": 2.0, "xy": 2 * sign}
                nodes |= {"agreed": 1 + sign, "counted": 2.0, "off": 1.0, "size": 2.0}
                found = {"": unknown | path}
                if cell.method == OF_NODES:
                    found = {size: unknown | nodes for size in ("all", "large")}
                    if model == "passkey-mamba":
                        found = {}
                records.append(Key(GRAPHS.name, model, *cell, 0, example), found)
    (tmp_path / "machine.json").write_text(json.dumps({"date": "2020-02-29", "torch": "9.9"}))
    tool.main(tmp_path, tmp_path)
    page = (tmp_path / tool.PAGE).read_text(encoding="utf-8")
    assert "Made on 2020-02-29 with torch 9.9." in page and "Of each model 4 texts" in page
    for table in rows(page, "model | token"):
        assert [row[0] for row in table] == list(MODELS)
        assert [[entry.split()[0] for entry in row[1:]] for row in table] == [
            ["1.000", "0.500", "1.000", "0.000", "0.000", "0.250", "0.750"]
        ] * 2
    (nodes,) = rows(page, "models | nodes")
    assert [row[:3] for row in nodes] == [
        ["two blocks (1 model)", size, rule]
        for size in ("all", "large")
        for rule in ("frozen", "half", "centred")
    ]
    assert [row[3].split()[0] for row in nodes] == ["1.000", "-1.000", "1.000"] * 2
    (by_model,) = rows(page, "model | nodes")
    assert [row[0] for row in by_model] == ["pairs-mamba"] * 2
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def recorded(tool: Any) -> Mapping[tuple[str, str, str, str], Mapping[str, str]]:
    with (ROOT / "docs" / tool.TABLES / "graphs.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    return {(row["model"], row["method"], row["formulation"], row["row"]): row for row in found}


def check(said: str, row: Mapping[str, str], column: str) -> None:
    if said == "-":
        assert row[column] == "nan"
        return
    value, low, high = (float(x) for x in re.findall(r"-?\d+\.\d+", said))
    for number, name in ((value, column), (low, f"{column} low"), (high, f"{column} high")):
        assert number == pytest.approx(float(row[name]), abs=5.1e-4), (said, row)


def test_the_shipped_page_says_what_its_table_says(tool: Any) -> None:
    page = (ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8")
    found = recorded(tool)
    assert {name for group in GRAPHS.groups.values() for name in group} == {
        model for model, *_ in found if "(" not in model
    }
    for group, cut, *entries in rows(page, "models | what is cut")[0]:
        method, _, rule = cut.partition(", ")
        for column, said in zip(GRAPHS.columns, entries, strict=False):
            check(said, found[group, method, rule, ""], column.name)
    by_rule = rows(page, "model | token")
    for rule, table in zip(("frozen", "centred"), by_rule, strict=True):
        assert len(table) == 20
        for model, token, place, *without, cut, others in table:
            path = found[model, PATH, rule, ""]
            for cell, said in zip((WHOLE, SOURCES_CUT, DIRECT_CUT), without, strict=True):
                check(said, found[(model, *cell, "")], "accuracy")
            for column, said in (("token", token), ("place", place)):
                check(said, path, column)
            for column, said in (("accuracy", cut), ("others cut", others)):
                check(said, path, column)
    for group, size, rule, *entries in rows(page, "models | nodes")[0]:
        for column, said in zip(("r", "signs", "error"), entries, strict=True):
            check(said, found[group, OF_NODES, rule, size], column)
    for model, size, *entries in rows(page, "model | nodes")[0]:
        at = [(name, rule) for name in ("r", "signs") for rule in ("frozen", "half", "centred")]
        for (column, rule), said in zip(at, entries, strict=True):
            check(said, found[model, OF_NODES, rule, size], column)
