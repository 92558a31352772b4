"""Every page that the package writes or serves breaks no rule of axe-core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
BUSY = "document.querySelector('[aria-busy]') !== null"
#: What is chosen in each page.
PAGES = {
    "readme": '#text .token[data-index="3"]',
    "long": '#text .token[data-index="405"]',
    "image": '#picture .token[data-index="3"]',
    "answers": '#answer .token[data-index="3"]',
    "results": '#rows .token[data-index="3"]',
    "layers": '#rows .token[data-index="3"]',
    "maps": "#maps canvas",
}


@pytest.fixture
def sized(page: Page, view: int) -> Iterator[Page]:
    """An empty page, at each width and in each theme."""
    if axe.script() is None:
        pytest.skip(f"needs {axe.PACKAGE}, see CONTRIBUTING.md")
    yield page
    assert page.errors == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_written(sized: Page, written: Callable[[str], Path], name: str) -> None:
    """Nothing is wrong with all unfolded, which shows what is seen at first, and a choice."""
    sized.goto(written(name))
    sized.evaluate(UNFOLD)
    sized.click(PAGES[name])
    sized.drawn()
    assert axe.violations(sized) == []


INSIGHTS: dict[str, Callable[[], Any]] = {
    "texts": lambda: sentences(
        [[0, 1, 3, 4, 2], [4, 3, 0, 5, 6]], models=2, attribution_arguments={"rule": "centred"}
    ),
    "photos": lambda: photos(cnn(), [Batch(torch.rand(2, 3, 6, 6), torch.tensor([1, 2]))]),
    "numbers": lambda: table(table_model(), [numbers(1, 0, 2)]),
}


@pytest.mark.parametrize(
    ("kind", "kept"), [("texts", False), ("texts", True), ("photos", False), ("numbers", True)]
)
def test_insights(sized: Page, kind: str, kept: bool, tmp_path: Path) -> None:
    with INSIGHTS[kind]() as visualizer:
        if kept:
            visualizer.snapshot(tmp_path / "kept.html")
            sized.goto(tmp_path / "kept.html")
        else:
            visualizer.serve()
            sized.goto(visualizer.url)
        sized.wait_for(f"!({BUSY}) && document.querySelector('article') !== null")
        sized.evaluate(UNFOLD)
        if kind == "texts" and not kept:
            sized.wait_for(f"!({BUSY}) && document.querySelector('.graph svg') !== null")
            sized.click(".cutting form button")
            sized.wait_for(f"!({BUSY}) && document.querySelector('.cutting table') !== null")
        sized.evaluate("document.querySelector('main').setAttribute('aria-busy', 'true')")
        sized.drawn()
        assert axe.violations(sized) == []


def test_a_fault_is_found(sized: Page, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        '<!doctype html><html lang="en"><title>t</title><main><h1>t</h1>'
        '<p style="color: #999; background: #aaa">pale</p><img src="data:,"></main></html>',
        encoding="utf-8",
    )
    sized.goto(path)
    found = [line.partition(" ")[0] for line in axe.violations(sized)]
    assert found == ["color-contrast", "image-alt"]
