"""The pages of results say what was recorded."""

from __future__ import annotations

import csv
import json
import random
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS, Key, Records, lines
from captum_ssm_bench.harness.excerpt import excerpt
from captum_ssm_bench.harness.tables import as_csv
from captum_ssm_bench.harness.verdicts import Side

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
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
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tool that makes pages; those that it is made of are its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    before = set(sys.modules)
    yield import_module("results_page")
    for name in set(sys.modules) - before:
        if name.startswith("results_"):
            del sys.modules[name]


@pytest.fixture
def tables(tools: Any) -> Any:
    return import_module("results_tables")


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


def test_the_pages_of_some_results(tools: Any, tables: Any, results: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    tables.main(results, docs)
    pages = tools.pages(docs)
    assert set(pages) == {
        f"results/{name}.md"
        for name in ("copying", "orderings", "orderings-asked", "orderings-latim")
    }
    copying = pages["results/copying.md"]
    assert "Made on 2020-02-29 with torch 9.9." in copying
    order = re.findall(r"^\| (\w[\w ]*) \| (\w+) \| ([\w ]*) \| \d", copying, re.MULTILINE)
    assert order == [
        ("LatimFlow", "frozen", ""),
        ("MambaLRP", "half", ""),
        ("ImplicitAttention", "s6", "layer 1"),
        ("LatimNorm l2", "silu", "layer 1"),
    ]
    # published: l2 beats Mamba-Attention and MambaLRP; here it is below both
    orderings = pages["results/orderings.md"]
    assert "| LATIM, table 2 | 0 | 6 | 0 |" in orderings
    assert "12 of LATIM, table 3 (translation)" in re.sub(r"\s+", " ", orderings)
    assert "\n| LatimFlow, frozen | MambaLRP, half | 1 | 0 | 0 |\n" in orderings
    said = (
        "copying-mamba | LatimNorm l2, silu, best layer | ImplicitAttention, s6, best layer | AP "
    )
    found = r"\| 0\.41 against 0\.36 \| -0\.\d+ \[.*\] \| refuted here \|"
    assert re.search(re.escape(said) + found, pages["results/orderings-latim.md"])
    asked = "copying-mamba | LatimFlow, frozen | MambaLRP, half | top 1 "
    one_by_one = pages["results/orderings-asked.md"]
    assert re.search(re.escape(asked) + r"\| 0\.\d+ \[.*\] \| better \|", one_by_one)
    for page in pages.values():
        check_tables(page)


def test_other_trainings_have_a_page(
    tools: Any, tables: Any, results: Path, tmp_path: Path
) -> None:
    again = Records(results / "trainings" / "copying")
    for key, rows in Records(results / "copying"):
        for model in (key.model, f"{key.model}@1"):
            again.append(key._replace(model=model), rows)
    tables.main(results, tmp_path)
    pages = tools.pages(tmp_path)
    check_tables(pages["results/again.md"])
    assert "copying-mamba, 60 examples of 2 trainings" in pages["results/again-copying.md"]
    assert "refuted here" in pages["results/again-orderings-latim.md"]
    assert "copying-mamba, 30 examples\n" in pages["results/copying.md"]


def test_what_was_not_measured_again_stays(tables: Any, results: Path, tmp_path: Path) -> None:
    tables.main(results, tmp_path)
    orderings = tmp_path / "results" / "orderings.csv"
    other = tables.judged(orderings)[0].__class__(
        "passkey", "made up", "m", "this", "that", "AP", "", 0.1, 0.05, 0.2, "confirmed"
    )
    tables.write_judged(orderings, [*tables.judged(orderings), other])
    (tmp_path / "results" / "passkey.csv").write_text("as it was")
    before = tables.judged(orderings)
    tables.main(results, tmp_path)
    assert tables.judged(orderings) == before and other in before
    assert (tmp_path / "results" / "passkey.csv").read_text() == "as it was"


def test_a_table_is_read_as_it_was_written(tables: Any, results: Path, tmp_path: Path) -> None:
    copying = EXPERIMENTS["copying"]
    path = tmp_path / "copying.csv"
    path.write_text(as_csv(copying, lines(copying, Records(results / "copying"))))
    found = tables.read_lines(copying, path)
    assert as_csv(copying, found) == path.read_text()
    assert [Side(t.method, t.formulation, t.row) for t in excerpt(copying, found)] == [
        side for side in sorted(ROWS, key=ROWS.__getitem__, reverse=True) if side.row != "layer 0"
    ]


# --- the pages that ship --------------------------------------------------------------------------
def test_the_shipped_pages_are_made_of_the_shipped_tables(tools: Any) -> None:
    for name, text in tools.pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, (
            f"run tools/results_page.py: {name}"
        )
        check_tables(text)


def test_every_page_has_its_picture(tools: Any) -> None:
    for name, text in tools.pages().items():
        shown = re.findall(r"!\[[^\]]*\]\((\S+)\)", text)
        missing = [each for each in shown if not (DOCS / name).parent.joinpath(each).exists()]
        assert not missing, name
        assert shown or "orderings-" in name or name == "results/again.md", name
    drawn = {path.stem for path in (DOCS / "images" / "results").glob("*.png")}
    assert drawn == set(tools.pictures())


def test_every_experiment_has_a_picture() -> None:
    shown = set()
    for page in (DOCS / "results").glob("*.md"):
        for each in re.findall(r"!\[[^\]]*\]\((\S+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / each).exists(), (page.name, each)
            shown.add(Path(each).stem)
    assert set(EXPERIMENTS) <= shown


def test_which_method_when_says_what_the_table_says() -> None:
    """Each number of the page's first part is one of the picture that it opens with."""
    page = (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
    said = page[page.index("No method is best") : page.index("\n| question")]
    columns = ("top 1", "ρ Shapley", "mask AP", "passes")
    shown = {
        (row["method"], row["formulation"], column): float(row[column])
        for row in read(DOCS / "results" / "causal.csv")
        if row["model"].startswith("confirming")
        for column in columns
        if row["model"].startswith("confirming on") == (column == "mask AP")
    }
    stated = {
        "0.95": ("LatimFlow", "frozen", "top 1"),
        "0.82": ("Shapley values", "", "top 1"),
        "0.65": ("LatimFlow", "centred", "ρ Shapley"),
        "0.44": ("LatimFlow", "frozen", "ρ Shapley"),
        "0.70": ("ExpectedGradients", "32 references", "ρ Shapley"),
        "0.89": ("LatimALTI", "", "mask AP"),
        "0.81": ("LatimFlow", "frozen", "mask AP"),
        "0.85": ("LatimFlow", "centred", "mask AP"),
        "0.56": ("ImplicitAttention", "", "mask AP"),
        "0.67": ("MambaAttribution", "", "mask AP"),
    }
    size = next(
        float(row["mAP"])
        for row in read(DOCS / "results" / "segmentation.csv")
        if row["model"] == "scenes-vim"
        and (row["method"], row["formulation"]) == ("LatimFlow", "patches, absolute")
    )
    assert set(re.findall(r"\d\.\d+", said)) == {*stated, f"{size:.2f}"}
    for number, where in stated.items():
        assert f"{shown[where]:.2f}" == number, where
    assert shown["ExpectedGradients", "32 references", "passes"] == 64
    tops = {where: value for where, value in shown.items() if where[2] == "top 1"}
    assert max(tops, key=tops.__getitem__) == stated["0.95"]
    objects = {where: value for where, value in shown.items() if where[2] == "mask AP"}
    assert max(objects, key=objects.__getitem__) == stated["0.89"]


def read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def check_tables(page: str) -> None:
    """Every row of a table has as many cells as its head."""
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block
