"""Pages of results: the directive that reads tables, and numbers in their texts."""

from __future__ import annotations

import csv
import json
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
    "results/roles.md",
    "results/compiled.md",
    "results/cuts.md",
    "methods/index.md",
)
_BLOCK = re.compile(r"^```\{measured\} (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\{measured\}`([^`]+)`")
_OPTION = re.compile(r"^:(\w+):(.*)", re.MULTILINE)

#: Pages whose decimals come from records.
PROSE = [
    *sorted(set(DOCS.rglob("*.md")) - {DOCS / "install.md"}),  # which lists versions
    *sorted((DOCS.parent / "tutorials").glob("*.ipynb")),
    DOCS.parent / "README.md",
]
#: Tolerances and definitions, by page.
EXCEPTIONS = {
    "gpus_and_sharded_models.md": {"0.1", "0.05"},  # bounds of checks
    "latim.md": {"0.9"},  # an example of a share
    "speed.md": {"3.5"},  # a bound of a check
    "README.md": {"0.61", "0.62"},  # see QUOTED
}
_FRESH = "fresh-models; fresh (63 models)"
#: What README.md says, and its record.
QUOTED = {
    "ρ = 0.61 with Shapley values": f"{_FRESH}; LatimFlow, balanced, own mean; ρ",
    "highest score in 86 %": f"{_FRESH}; LatimFlow, balanced, own mean; source first; .0%",
    "64 passes for 0.62": f"{_FRESH}; ExpectedGradients, 32 references; ρ",
    "0.62 and 74 %": f"{_FRESH}; ExpectedGradients, 32 references; source first; .0%",
    "is first in 95 %": f"{_FRESH}; LatimFlow, frozen; source first; .0%",
}
#: All that is not prose: code, roles, formulas, targets of links, versions and sizes of models.
_NO_PROSE = re.compile(
    r"\A---\n.*?^---$|^(`{3,}|:{3,}).*?^\1\s*$|\{\w+\}`[^`]*`|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$"
    r"|\]\([^)]*\)|arXiv:[\d.]+|\b\d+\.\d+B\b|\b\w+-\d+\.\d+\b|\d+(\.\d+){2,}"
    r"|\b(Captum|CUDA|matplotlib|Python|PyTorch|torch|transformers|Triton)"
    r" \d+(\.\d+)+( and \d+(\.\d+)+)?",
    re.DOTALL | re.MULTILINE,
)
#: A number, a percentage, or a number with its interval.
SHOWN = r"-?\d+(\.\d+)?( %| \[-?\d\.\d+, -?\d\.\d+\])?"
_DECIMAL = re.compile(r"(?<![\w.])-?\d*\.\d+")

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


@pytest.mark.parametrize("page", PROSE, ids=lambda path: path.stem)
def test_no_page_types_a_measured_decimal(page: Path) -> None:
    """Decimals come from tables, by the role or the directive: two pages then cannot disagree."""
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    typed = set(decimals(text)) - EXCEPTIONS.get(page.name, set())
    assert not typed, f"{page.name} types {sorted(typed)}: insert them with the role `measured`"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It costs 1.37 f+b.", ["1.37"]),
        ("r is\n.51, and -0.3 on images", [".51", "-0.3"]),
        ("| LatimFlow | 0.946 [0.917, 0.971] |", ["0.946", "0.917", "0.971"]),
        ("```python\nx = 0.5\n```\nand `0.5`, $x = 0.5$, [a](b#c-0.5)", []),
        ("{measured}`causal; a model;\nLatimFlow; top 1; .1f` of 2.8B, torch 2.13, 4.57.6", []),
    ],
)
def test_typed_decimals_are_found(text: str, found: list[str]) -> None:
    assert decimals(text) == found


@pytest.mark.parametrize(("said", "record"), QUOTED.items())
def test_the_readme_quotes_the_tables(measured: Any, said: str, record: str) -> None:
    """README.md is read as it is, where no role inserts numbers."""
    text = " ".join((DOCS.parent / "README.md").read_text("utf-8").split())
    assert said in text
    assert measured.number(record) in said


def test_numbers_in_sentences_are_in_the_tables(measured: Any) -> None:
    texts = [path.read_text("utf-8") for path in DOCS.rglob("*.md")]
    asked = [each for text in texts for each in _NUMBER.findall(text)]
    assert asked and all(re.fullmatch(SHOWN, measured.number(x)) for x in asked)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("causal; confirming (7 models); LatimFlow, frozen; top 1", "0.95"),
        ("copying; copying-mamba; LatimFlow, frozen; top 1; .0%", "93 %"),
        ("../speed/calls; Mamba; 2; LatimFlow\ncentered; .1f", "1.5"),
        ("roles; recall (4 models); LatimFlow, centered; key; interval", "0.925 [0.902, 0.948]"),
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


def decimals(text: str) -> list[str]:
    """The decimal numbers in a page's prose."""
    return _DECIMAL.findall(_NO_PROSE.sub(" ", text))
