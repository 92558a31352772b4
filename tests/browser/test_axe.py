"""Every page that the package writes or serves breaks no rule of axe-core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.made import sentences
from helpers import axe
from helpers.browser import Page
from helpers.insights_examples import cnn, numbers, photos, table, table_model

from captum_ssm.insights import Batch

UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
#: Leaves thirty of the words of a text and of the rows of a table: the others are like them.
SHORTEN = """document.querySelectorAll('.flow, tbody').forEach((each) => {
  [...each.querySelectorAll('.token, tr')].slice(30).forEach((alike) => { alike.remove(); });
})"""
BUSY = "document.querySelector('[aria-busy]') !== null"
#: What is chosen in each page.
PAGES = {
    "readme": "#cuts td button",
    "long": '#text .token[data-index="3"]',
    "image": '#picture .token[data-index="3"]',
    "answers": "#answer .token:nth-of-type(3)",
    "results": '#rows .token[data-index="3"]',
    "layers": '#rows .token[data-index="3"]',
    "maps": "#maps canvas",
}


@pytest.fixture(autouse=True)
def judge() -> None:
    if axe.script() is None:
        pytest.skip(f"needs {axe.PACKAGE}, see CONTRIBUTING.md")


def check(page: Page) -> None:
    """Nothing is wrong, wide and light or narrow and dark."""
    for width, scheme in ((1280, "light"), (390, "dark")):
        page.resize(width, 800)
        page.prefer(scheme)
        page.drawn()
        assert axe.violations(page) == [], f"{width} pixels, {scheme}"
    assert page.errors == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_written(page: Page, written: Callable[[str], Path], name: str) -> None:
    """With all unfolded, which shows what is seen at first, and a choice."""
    page.goto(written(name))
    page.evaluate(UNFOLD)
    page.click(PAGES[name])
    page.drawn()
    page.evaluate(SHORTEN)
    check(page)


INSIGHTS: dict[str, Callable[[], Any]] = {
    "texts": lambda: sentences(
        [[0, 1, 3, 4, 2], [4, 3, 0, 5, 6]], models=2, attribution_arguments={"rule": "centered"}
    ),
    "photos": lambda: photos(cnn(), [Batch(torch.rand(2, 3, 6, 6), torch.tensor([1, 2]))]),
    "numbers": lambda: table(table_model(), [numbers(1, 0, 2)]),
}


@pytest.mark.parametrize(
    ("kind", "kept"), [("texts", False), ("texts", True), ("photos", False), ("numbers", True)]
)
def test_insights(page: Page, kind: str, kept: bool, tmp_path: Path) -> None:
    with INSIGHTS[kind]() as visualizer:
        if kept:
            visualizer.snapshot(tmp_path / "kept.html")
            page.goto(tmp_path / "kept.html")
        else:
            visualizer.serve()
            page.goto(visualizer.url)
        page.wait_for(f"!({BUSY}) && document.querySelector('article') !== null")
        page.evaluate(UNFOLD)
        if kind == "texts" and not kept:
            page.wait_for(f"!({BUSY}) && document.querySelector('.graph svg') !== null")
            page.click(".cutting form button")
            page.wait_for(f"!({BUSY}) && document.querySelector('.cutting table') !== null")
        page.evaluate("document.querySelector('main').setAttribute('aria-busy', 'true')")
        check(page)


def test_a_fault_is_found(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        '<!doctype html><html lang="en"><title>t</title><main><h1>t</h1>'
        '<p style="color: #999; background: #aaa">pale</p><img src="data:,"></main></html>',
        encoding="utf-8",
    )
    page.goto(path)
    found = [line.partition(" ")[0] for line in axe.violations(page)]
    assert found == ["color-contrast", "image-alt"]
