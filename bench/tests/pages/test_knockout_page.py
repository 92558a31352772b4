"""The page of knock-outs says what was recorded."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from captum_ssm_bench import EXPERIMENTS, Key, Records

ROOT = Path(__file__).resolve().parents[3]
KNOCKOUT, PARTS = EXPERIMENTS["knockout"], EXPERIMENTS["hybrid-parts"]
MODELS = ("passkey-mamba", "pairs-mamba", "scenes-vit")
HYBRIDS = ("copying-bamba", "pairs-bamba")


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("knockout", ROOT / "tools" / "knockout_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder as the command leaves it: of four texts with two edges of effects 1 and -1 each.

    What is estimated is right, but in text 0 of the wrong sign where the model is as it is.
    """
    folder = tmp_path / "results"
    records, parts = (Records(folder / each.name) for each in (KNOCKOUT, PARTS))
    for model in MODELS:
        for example in range(4):
            for cell in KNOCKOUT.cells():
                wrong = cell.method == "as it is" and example == 0
                x = -1.0 if wrong else 1.0
                numbers = {"n": 2.0, "x": 0.0, "y": 0.0, "z": 0.0, "xx": 2.0, "yy": 2.0, "zz": 2.0}
                numbers |= {"xy": 2 * x, "zy": 2 * x, "agreed": 1 + x, "agreed_matched": 1 + x}
                numbers |= {"counted": 2.0, "counted_matched": 2.0, "off": 2 * (1 - x)}
                numbers |= {"off_matched": 2 * (1 - x), "size": 2.0, "size_matched": 2.0}
                edges = {
                    f"{kind} {i}": y
                    for kind in ("true", "estimated", "matched")
                    for i, y in enumerate((1.0, -1.0))
                }
                rows = {row: numbers for row in ("large", "even", "layer 0, Mamba")}
                key = Key(KNOCKOUT.name, model, *cell, 0, example)
                records.append(key, {"all": numbers | edges, **rows})
    for model in HYBRIDS:
        for cell in PARTS.cells():
            row = "layer 1, head 00" if "head" in cell.method else ""
            numbers = {"right": random.random(), "probability": random.random()}
            parts.append(Key(PARTS.name, model, *cell, 0, 0), {row: numbers})
    machine = {"date": "2020-02-29", "torch": "9.9"}
    (folder / "machine.json").write_text(json.dumps(machine))
    return folder


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table that begins so."""
    _, _, table = page.partition(f"\n| {head}")
    lines = re.match(r"[^\n]*\n\|[^\n]*\n((?:\|[^\n]*\n)+)", table)
    assert lines is not None, head
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1].splitlines()]


def test_the_page_of_some_results(tool: Any, results: Path, tmp_path: Path) -> None:
    tool.main(results, tmp_path)
    page = (tmp_path / tool.PAGE).read_text(encoding="utf-8")
    assert "Made on 2020-02-29 with torch 9.9." in page
    assert "10 of each\nof 4 texts" in page
    flat = " ".join(page.split())
    assert "signs agree for 75% of edges on language models and for 75% on images" in flat
    assert "r is 0.50, and 0.50 on images" in flat and "held r is 1.00, and 1.00 with" in flat
    groups = rows(page, "models | edges | r")
    assert [row[:2] for row in groups] == [
        [group, half]
        for group in ("language models (2 models)", "image models (1 model)")
        for half in ("all", "large", "even")
    ]
    assert all(entry.startswith("0.500 [") for entry in (row[2] for row in groups))
    assert all(entry.startswith("0.750 [") for entry in (row[3] for row in groups))
    assert [row[0] for row in rows(page, "model | mixers")] == list(MODELS)
    assert rows(page, "model | as it is | mixers held")[0] == [MODELS[0], "0.50", *["1.00"] * 5]
    assert rows(page, "model | as it is | exact norms")[2] == [MODELS[2], "0.50", *["1.00"] * 6]
    assert [row[1] for row in rows(page, "model | layer")] == ["0, Mamba"] * 3
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block
    assert (tmp_path / tool.PICTURE).read_bytes().startswith(b"\x89PNG")


def table(tool: Any, name: str) -> list[Mapping[str, str]]:
    with (ROOT / "docs" / tool.TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def label(row: Mapping[str, str]) -> str:
    return ", ".join(filter(None, (row["method"], row["formulation"])))


def test_the_shipped_page_says_what_its_tables_say(tool: Any) -> None:
    page = (ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8")
    found = {(row["model"], label(row), row["row"]): row for row in table(tool, "knockout")}
    named = {name for group in KNOCKOUT.groups.values() for name in group}
    assert named == {model for model, _, _ in found if "(" not in model}

    def check(said: str, column: str, at: tuple[str, str, str]) -> None:
        places = 5.1e-3 if "[" not in said else 5.1e-4
        assert float(said.split()[0]) == pytest.approx(float(found[at][column]), abs=places), at

    for model, half, *entries in rows(page, "models | edges | r"):
        for column, said in zip(("r", "signs", "error"), entries, strict=True):
            check(said, column, (model, "as it is", half))
    for what, columns in (
        ("held", ("r, matched", "signs, matched", "error, matched")),
        ("estimate", ("r", "signs", "error")),
    ):
        for model, cell, *entries in rows(page, f"models | {what}"):
            for column, said in zip(columns, entries, strict=True):
                check(said, column, (model, cell, "all"))
    for first, column in (("mixers held", "r, matched"), ("exact norms", "r")):
        head = re.search(rf"\| model \| (as it is \| {first}.*) \|\n", page)
        assert head is not None
        for model, *entries in rows(page, f"model | as it is | {first}"):
            for cell, said in zip(head[1].split(" | "), entries, strict=True):
                check(said, column, (model, cell, "all"))
    for model, layer, *entries in rows(page, "model | layer"):
        for column, said in zip(("r", "signs", "error"), entries, strict=True):
            check(said, column, (model, "as it is", f"layer {layer}"))
    assert (ROOT / "docs" / tool.PICTURE).stat().st_size < 120_000


@pytest.mark.parametrize("model", HYBRIDS)
def test_what_is_said_of_hybrids_is_what_was_measured(tool: Any, model: str) -> None:
    page = (ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8")
    found = {
        (label(row), row["row"]): row
        for row in table(tool, "hybrid-parts")
        if row["model"] == model
    }
    assert all(int(row["examples"]) >= 200 for row in found.values())
    accuracy = {at: float(row["accuracy"]) for at, row in found.items()}
    said = [row[1:3] for row in rows(page, "model | what is cut") if row[0] == model]
    assert len(said) == 2 + 2 * 4
    for cut, entry in said:
        assert float(entry.split()[0]) == pytest.approx(accuracy[cut, ""], abs=5.1e-4)
    chance = accuracy["any answer", ""]
    for lost in ("off, attention", "answer to asking token cut, attention"):
        assert float(found[lost, ""]["accuracy low"]) <= chance
    for kept in ("answer to asking token cut, ssm", "answer to asking token alone, attention"):
        assert accuracy[kept, ""] > 0.99
    assert accuracy["off, ssm", ""] < 0.5
    far = accuracy["far messages cut, ssm", ""]
    assert far > 0.99 if model == "pairs-bamba" else far < 0.75
    for head in (f"layer 1, head {head:02}" for head in range(4)):
        assert accuracy["one head off, attention", head] > 0.99
        assert accuracy["one head alone, attention", head] < 0.9
