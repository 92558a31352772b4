"""What the documentation adds to its theme: scrolling by keyboard, and frames in its colours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.browser import Page
from helpers.documents import ROOT
from matplotlib.image import imread

from captum_ssm.attr import Comparison

STATIC = ROOT / "docs" / "_static"
#: As the theme writes them: code of 60 characters, and a table of a line that does not break.
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>t</title>
<link rel="stylesheet" href="{static}/pages.css"><script src="{static}/pages.js"></script>
<style>body {{ margin: 0 }} .main {{ display: flex }}
pre, .table-wrapper {{ overflow: auto; margin: 0; font: 16px monospace }}</style>
<div class="main"><div class="content"><article><section><h1>Cost<a href="#">#</a></h1>
<pre>{code}</pre>
<div class="table-wrapper"><table><tr><td style="white-space: pre">{code}</td></tr></table></div>
</section></article></div></div></html>"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(PAGE.format(static=STATIC.as_uri(), code="x" * 60), encoding="utf-8")
    return path


def test_what_is_too_wide_is_scrolled_by_keyboard(page: Page, written: Path) -> None:
    page.resize(390)
    page.goto(written)
    page.keys("Tab")  # the link in the heading
    for selector, name in (("pre", "Code of Cost"), (".table-wrapper", "Table of Cost")):
        page.keys("Tab")
        assert page.evaluate(f"document.activeElement.matches('{selector}')")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == name
        assert page.style(selector, "outline-style") == "solid"
        page.keys("ArrowRight")
        page.wait_for(f"document.querySelector('{selector}').scrollLeft > 0")
    assert not page.errors and page.overflow() <= 0


def test_what_fits_takes_no_focus(page: Page, written: Path) -> None:
    page.resize(1280)
    page.goto(written)
    assert page.count(".content [tabindex]") == 0
    page.resize(390)
    page.wait_for("document.querySelectorAll('.content [tabindex]').length === 2")


@pytest.mark.parametrize(("chosen", "system"), [("dark", "light"), ("light", "dark")])
def test_a_frame_follows_the_theme_that_is_chosen(
    page: Page, tmp_path: Path, chosen: str, system: str
) -> None:
    frame = Comparison({"one": torch.tensor([[0.5, -1.0]])})._repr_html_()
    path = tmp_path / "page.html"
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="{STATIC.as_uri()}'
        f'/pages.css"><body data-theme="{chosen}">{frame}</body>',
        encoding="utf-8",
    )
    page.prefer(system)
    page.goto(path)
    page.drawn()
    box = page.box("iframe")
    x, y = (int(box["left"] + box["right"]) // 2, int(box["top"] + box["bottom"]) // 2)
    shade = imread(page.screenshot(tmp_path / "shot.png"))[y, x, :3].mean()
    assert (shade < 0.2) if chosen == "dark" else (shade > 0.9)
