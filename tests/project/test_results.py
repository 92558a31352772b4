"""Pages of results: the directive that reads tables, and numbers in their texts."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (
    "results.md",
    "results/interventions.md",
    "results/compiled.md",
    "results/cuts.md",
    "methods/index.md",
)
_BLOCK = re.compile(r"^```\{measured\} (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\{measured\}`([^`]+)`")
_OPTION = re.compile(r"^:(\w+):(.*)", re.MULTILINE)

TABLE = """\
model,method,formulation,row,trainings,examples,AP,AP low,AP high,runs,runs low,runs high
b,one,,layer 0,1,9,0.25,0.2,0.3,2,2,2
b,one,,layer 1,1,9,0.75,0.7,0.8,2,2,2
b,two,x,,1,9,0.5,0.4,0.6,4,4,4
b,none,,,1,9,nan,nan,nan,4,4,4
a,two,x,,1,9,0.1234,-0.0001,0.2,4,4,4
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The extension of Sphinx."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    yield import_module("measured")
    del sys.modules["measured"]


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        (
            {"columns": "AP", "models": "a|b"},
            [
                ["a", "two, x", "0.123 [0.000, 0.200]"],
                ["b", "one, layer 0", "0.250 [0.200, 0.300]"],
                ["b", "one, layer 1", "0.750 [0.700, 0.800]"],
                ["b", "two, x", "0.500 [0.400, 0.600]"],
                ["b", "none", "-"],
            ],
        ),
        (
            {"columns": "AP", "models": "b", "best": "1", "lowest": ""},
            [["b", "one, layer 0", "0.250 [0.200, 0.300]"]],
        ),
        (
            {"columns": "runs", "whole": "runs", "methods": "two, x | one, layer 0", "models": "b"},
            [["b", "two, x", "4"], ["b", "one, layer 0", "2"]],
        ),
        ({"columns": "AP", "pivot": "", "methods": "two"}, [["b", "0.50"], ["a", "0.12"]]),
    ],
)
def test_tables(measured: Any, options: dict[str, str], cells: list[list[str]]) -> None:
    rows = list(csv.DictReader(TABLE.splitlines()))
    assert measured.table(rows, options)[1:] == cells


@pytest.mark.parametrize("page", [*PAGES, "methods/content_or_cause.md"])
def test_all_that_is_asked_for_is_in_the_tables(measured: Any, page: str) -> None:
    """Models, methods, rows and columns by their names."""
    blocks = _BLOCK.findall((DOCS / page).read_text("utf-8"))
    assert blocks
    for name, text in blocks:
        options = {key: value.strip() for key, value in _OPTION.findall(text)}
        assert len(options) == len(text.splitlines()), (page, name)
        assert options.keys() <= {*measured.OPTIONS, measured.WHOLE}
        rows = list(read((DOCS / page).parent / name))
        lines = {measured.label(row) for row in rows} | {row["method"] for row in rows}
        lines |= {f"{row['method']}, {row['formulation']}" for row in rows}
        known = {
            "models": {row["model"] for row in rows},
            "methods": lines,
            "rows": {row["row"] for row in rows},
            "columns": rows[0].keys(),
            "whole": rows[0].keys(),
        }
        for option, those in known.items():
            assert set(measured.names(options, option)) <= those, (page, name, option)
        assert measured.chosen(rows, options)


@pytest.mark.parametrize("page", PAGES)
def test_numbers_with_intervals_are_those_of_a_table(measured: Any, page: str) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").split())
    known = {
        measured.entry(row, name)
        for table in (DOCS / "results").glob("*.csv")
        for row in read(table)
        for name in row
        if f"{name} low" in row
    }
    assert set(re.findall(r"-?\d\.\d+ \[[^\]]+\]", text)) <= known


def test_numbers_in_sentences_are_in_the_tables(measured: Any) -> None:
    texts = [path.read_text("utf-8") for path in DOCS.rglob("*.md")]
    asked = [each for text in texts for each in _NUMBER.findall(text)]
    assert asked and all(re.fullmatch(r"-?\d+(\.\d+)?( %)?", measured.number(x)) for x in asked)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("causal; confirming (7 models); LatimFlow, frozen; top 1", "0.95"),
        ("copying; copying-mamba; LatimFlow, frozen; top 1; .0%", "93 %"),
        ("../speed/calls; Mamba; 2; LatimFlow\ncentered; .1f", "1.5"),
    ],
)
def test_one_number(measured: Any, asked: str, shown: str) -> None:
    assert measured.number(asked) == shown


def test_a_number_that_no_table_has_is_an_error(measured: Any) -> None:
    for asked in ("causal; no model; LatimFlow, frozen; top 1", "causal; confirming (7 models)"):
        with pytest.raises(ValueError):
            measured.number(asked)


def read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
