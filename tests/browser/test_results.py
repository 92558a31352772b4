"""What methods return, as pages in a real browser and in frames of notebooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.browser import Page
from helpers.insights_examples import Always, numbers, table

from captum_ssm.attr import Comparison

PAGE = "results"


def test_pointing_tells_the_numbers_of_all_rows(opened: Page) -> None:
    opened.hover('#rows section:nth-child(2) .token[data-index="3"]')
    said = opened.text("#status")
    assert said.startswith("Token 3 “lamp”: relevance +") and "as content +" in said
    rows = opened.count("#rows section")
    assert rows > 3 and opened.count(".token.current") == rows
    opened.click('#rows section:nth-child(1) .token[data-index="3"]')
    opened.hover('#rows section:nth-child(1) .token[data-index="5"]')
    assert opened.text("#status").startswith("Token 3 “lamp” (kept)")
    opened.keys("Escape", "Escape")
    assert opened.count(".token.current") == 0
    opened.click("#numbers summary")
    opened.wait_for("document.querySelectorAll('#numbers-table tbody tr').length > 0")
    assert opened.count("#numbers-table tbody tr") == 14
    assert opened.text("#sum").startswith("The output +")
    opened.click("#biases summary")
    assert opened.count("#biases tbody tr") > 3


@pytest.mark.parametrize("kind", ["result", "insights"])
def test_a_frame_of_a_notebook(page: Page, tmp_path: Path, kind: str) -> None:
    """Its script runs in a frame of another origin than the notebook's, and asks for nothing."""
    found = Comparison({"one": torch.tensor([[0.5, -1.0]])}).named(["a</iframe>", "b"])
    shown = found if kind == "result" else table([Always(1)], [numbers(1, 0)])
    frame, shots = shown._repr_html_(), []
    for number, allowed in enumerate((frame, frame.replace("allow-scripts", ""))):
        path = tmp_path / f"notebook{number}.html"
        path.write_text(f"<!doctype html><title>n</title>{allowed}", encoding="utf-8")
        page.goto(path)
        page.drawn()
        assert page.evaluate("document.querySelector('iframe').contentDocument") is None
        assert [r for r in page.requests if not r.startswith("about:")] == [path.as_uri()]
        assert [error for error in page.errors if number == 0 or "sandboxed" not in error] == []
        shots.append(page.screenshot(tmp_path / f"shot{number}.png").read_bytes())
    assert len(shots[0]) > len(shots[1])  # the script drew


def test_a_map(page: Page, written: Callable[[str], Path]) -> None:
    page.goto(written("maps"))
    assert page.count("#maps canvas") == 2
    assert page.evaluate("document.querySelector('#maps canvas').width") == 6
    assert page.errors == []
