"""Words, methods that say nothing and the pages of results, in a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.made import of_recall
from helpers.browser import PATIENCE, Page
from helpers.insights_examples import Always, numbers, table
from helpers.pages import read_page
from zoo.language import byte_tokenizer
from zoo.small import mamba_lm

from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaAttribution, report
from captum_ssm.attr import Comparison
from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature
from captum_ssm.viz import Tokens
from captum_ssm.viz.html.writing import summary_lines


def write(kind: str, path: Path) -> None:
    """A page that shows a text of bytes."""
    tokenizer, model = byte_tokenizer(), mamba_lm(vocab_size=260)
    ids = torch.tensor([tokenizer.encode("cat on\n好")])
    if kind == "report":
        report(model, ids, [LatimFlow], tokenizer=tokenizer, matrices=False, path=path)
    else:
        feature = TextFeature("text", None, None, lambda ids: Tokens.of(tokenizer, ids[0]))
        classes = [str(i) for i in range(260)]
        visualizer = AttributionVisualizer(model, classes, feature, [Batch(ids, None)])
        visualizer.config = FilterConfig("MambaAttribution")
        visualizer.snapshot(path, classes=1)


@pytest.mark.parametrize(("kind", "width"), [("report", 390), ("insights", 1280)])
def test_tokens_of_a_word_touch_each_other(
    page: Page, tmp_path: Path, kind: str, width: int
) -> None:
    torch.manual_seed(0)
    write(kind, tmp_path / "words.html")
    page.resize(width)
    page.goto(tmp_path / "words.html")
    page.wait_for("document.querySelector('.flow .token') !== null")
    tokens = "[...document.querySelector('.flow').querySelectorAll('.token')]"
    texts = page.evaluate(f"{tokens}.map((t) => t.innerText)")
    assert texts == ["c", "a", "t", "␣", "o", "n", r"\n", "好", "₂", "₃"]
    boxes: list[Any] = page.evaluate(f"{tokens}.map((t) => t.getBoundingClientRect().toJSON())")
    gaps = [b["left"] - a["right"] for a, b in pairwise(boxes)]
    assert gaps[0] == gaps[1] == gaps[4] == gaps[7] == gaps[8] == 0
    assert gaps[2] > 1 and gaps[3] > 1
    assert boxes[7]["top"] > boxes[6]["bottom"]  # a line ends there
    assert page.overflow() <= 0 and page.errors == []
    if kind == "report":  # whose list is of whole words, and the terminal's too
        (example,) = read_page(tmp_path / "words.html").facts["examples"]
        assert example["shards"] == [1, 2, 5, 8, 9]
        values = example["methods"][0]["values"]
        words = {
            "cat": values[:3],
            "␣": values[3:4],
            "on": values[4:6],
            r"\n": values[6:7],
            "好": values[7:],
        }
        rows = [row.split("\t") for row in page.texts("#strongest tbody tr", "innerText")]
        found = {row[1]: float(row[-1].replace("−", "-")) for row in rows}
        assert found == pytest.approx(
            {name: sum(x) for name, x in words.items()}, rel=1e-2, abs=1e-6
        )
        said = summary_lines(example, example["methods"][0])
        assert all(f"{name} ({sum(x):+.3g}, token" in said for name, x in words.items())


def test_a_method_that_says_nothing_is_pale_and_says_so(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "nothing.html"
    of_recall(path, methods=[MambaAttribution, ImplicitAttentionRollout], matrices=False)
    facts = read_page(path).facts["examples"][0]["methods"]
    assert [method["silent"] for method in facts] == [True, False]
    page.goto(path)
    said = page.texts("#methods .largest", "innerText")
    assert said[0].startswith("negligible: at most +") and said[1].startswith("strongest +")
    tinted = "e.style.backgroundColor !== ''"
    assert not any(page.each("#text .token", tinted))
    page.click("#methods label:nth-of-type(2)")
    assert sum(page.each("#text .token", tinted)) > 3
    assert page.overflow() <= 0 and page.errors == []


PAGE = "results"


def test_pointing_tells_the_numbers_of_all_rows(opened: Page) -> None:
    opened.hover('#rows section:nth-child(2) .token[data-index="3"]')
    said = opened.text("#status")
    assert said.startswith("Token 3 “lamp”: relevance +") and "as content +" in said
    rows = opened.count("#rows section")
    assert rows > 3 and opened.count(".token.current") == rows
    opened.click('#rows section:nth-child(1) .token[data-index="3"]')
    opened.hover('#rows section:nth-child(1) .token[data-index="5"]')
    assert opened.text("#status").startswith("Token 3 “lamp” (selected)")
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
    frame, path, seen = shown._repr_html_(), tmp_path / "notebook.html", []
    for allowed in (frame.replace("allow-scripts", ""), frame):
        path.write_text(f"<!doctype html><title>n</title>{allowed}", encoding="utf-8")
        page.goto(path)
        assert page.evaluate("document.querySelector('iframe').contentDocument") is None
        assert [r for r in page.requests if not r.startswith("about:")] == [path.as_uri()]
        assert [e for e in page.errors if allowed == frame or "sandboxed" not in e] == []
        until = time.monotonic() + PATIENCE  # the frame is drawn by another process
        while len(seen) < 2 or len(seen[-1]) <= len(seen[0]):
            page.drawn()
            seen.append(page.screenshot(tmp_path / "seen.png").read_bytes())
            if allowed != frame:
                break
            assert time.monotonic() < until, "the script draws nothing"


def test_a_map(page: Page, written: Callable[[str], Path]) -> None:
    page.goto(written("maps"))
    assert page.count("#maps canvas") == 2
    assert page.evaluate("document.querySelector('#maps canvas').width") == 6
    assert page.errors == []
