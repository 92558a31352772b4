"""Cuts in a report: the page shows what a fresh run without the messages says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.made import PROMPT, number
from helpers.browser import Page
from helpers.pages import read_page

from captum_ssm import Edges, knock_out
from captum_ssm.models import load_bundled

PAGE = "readme"
LAMP, KITE = (1, 3, 13), (1, 8, 13)
FROM_LAMP, FROM_KITE = ("all", 3), ("all", 8)


def called(edge: Sequence[Any]) -> str:
    """The code of an edge, or of all messages from a token."""
    whole, source = edge[0] == "all", edge[1]
    return f"Edges(sources={source}, targets='other')" if whole else f"Edges{tuple(edge)}"


def run_without(*edges: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Logits and probabilities of the next word in a fresh run, and the vocabulary."""
    model, vocabulary = load_bundled()
    cut = [eval(called(edge), {"Edges": Edges}) for edge in edges]
    with torch.no_grad(), knock_out(model, *cut):
        logits = model(torch.tensor([vocabulary.encode(PROMPT)])).logits[0, -1].double()
    return logits, logits.softmax(-1), vocabulary


def percent(text: str) -> float:
    return float(text.strip("<> %")) / 100


def check(page: Page, *edges: Sequence[int]) -> None:
    """Frame, bars, score and address are those of the model without these edges."""
    logits, chances, vocabulary = run_without(*edges)
    best = chances.topk(5)
    words = [vocabulary.decode([k]) for k in best.indices.tolist()]
    assert page.text("#cuts .framed") == words[0]
    assert percent(page.text("#cuts .chance")) == pytest.approx(float(best.values[0]), abs=1e-3)
    lines = dict(page.each("#cuts .bars li:not([hidden])", "[e.firstChild.title, e.innerText]"))
    for word, chance in zip(words, best.values.tolist(), strict=True):
        assert percent(lines[word].rpartition("\n")[2]) == pytest.approx(chance, abs=1e-3)
    score = float(logits[vocabulary.id_of("lamp")])
    assert number(lines["score of lamp"].rpartition("\n")[2]) == pytest.approx(score, rel=5e-3)
    said = page.text("#cuts .say")
    assert ("Without" in said) == bool(edges) and words[0] in said
    asked = ",".join(".".join(map(str, edge)) for edge in edges)
    assert page.evaluate("location.hash") == (f"#cut={asked}" if edges else "")
    calls = ", ".join(map(called, edges))
    code = page.texts("#cuts code", "innerText")
    assert code == ([f"knock_out(model, {calls})"] if edges else [])
    assert page.count(".arc.cut") == page.count("#cuts td [aria-pressed='true']") == len(edges)


def click_arc(page: Page, made: Path, edge: Sequence[int]) -> None:
    """Click on a message's arc, in its middle."""
    rows = read_page(made).facts["examples"][0]["cuts"]["rows"]
    place = [(row["layer"], row["source"], row["target"]) for row in rows].index(tuple(edge))
    page.scroll_to("#cuts .stage")
    ink = f"document.querySelectorAll('.arc .ink')[{place}]"
    box = page.box("#cuts .arcs")
    point = f"(({ink}).getPointAtLength({ink}.getTotalLength() / 3))"
    x, y = page.evaluate(f"[{point}.x, {point}.y]")
    page.click_at(box["x"] + x, box["y"] + y)


def widths(page: Page) -> list[float]:
    return page.each(".arc .ink", "parseFloat(e.style.strokeWidth)")


def test_a_click_cuts_and_another_heals(opened: Page, made: Path) -> None:
    check(opened)
    whole = widths(opened)
    assert max(whole) == whole[0] > 5 * sorted(whole)[-2]
    click_arc(opened, made, LAMP)
    check(opened, LAMP)
    # widths are those of the model as it is cut
    kite = opened.each(".arc", "e.ariaLabel.includes('“kite” (token 8) to “the”')").index(True)
    cut = widths(opened)
    assert max(cut[1:]) == cut[kite] > 2 * whole[kite]
    click_arc(opened, made, KITE)
    check(opened, LAMP, KITE)
    assert opened.count(".arc[aria-disabled='true']") == len(whole) - 2
    click_arc(opened, made, LAMP)
    check(opened, KITE)
    opened.click("#cuts .heal")
    check(opened)


def test_the_picture_is_what_is_seen(opened: Page, made: Path) -> None:
    """Copied, or where that is not allowed, a file; with the arcs' colors and what is said."""
    click_arc(opened, made, LAMP)
    opened.evaluate(
        "navigator.clipboard.write = async ([item]) => {"
        "const image = await createImageBitmap(await item.getType('image/png'));"
        "const canvas = new OffscreenCanvas(image.width, image.height).getContext('2d');"
        "canvas.drawImage(image, 0, 0);"
        "const { data } = canvas.getImageData(0, 0, image.width, image.height);"
        "globalThis.colors = new Map(); for (let i = 0; i < data.length; i += 4) {"
        "const key = data.slice(i, i + 3).join(); colors.set(key, (colors.get(key) ?? 0) + 1); }"
        "globalThis.size = [image.width, image.height]; }, null"
    )
    opened.focus("#cuts .copy")
    opened.keys("Enter")
    opened.wait_for("document.querySelector('#cuts .why').textContent.includes('copied')")
    stage = opened.box("#cuts .stage")
    assert opened.evaluate("size[0]") >= 2 * stage["width"] - 2
    colors = opened.evaluate("Object.fromEntries(colors)")
    ground = max(colors, key=lambda key: colors[key])
    page = opened.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).join()")
    assert ground == page
    reddish = [key for key in colors if (c := [*map(int, key.split(","))])[0] > c[2] + 60]
    purple = [key for key in colors if (c := [*map(int, key.split(","))])[2] > c[1] + 60]
    assert sum(colors[key] for key in reddish) > 500 and sum(colors[key] for key in purple) > 500
    opened.evaluate("navigator.clipboard.write = () => Promise.reject(), null")
    opened.click("#cuts .copy")
    opened.wait_for("document.querySelector('#cuts .why').textContent.includes('saved')")


def test_keys_alone(opened: Page) -> None:
    opened.focus("#cuts .arc[tabindex='0']")
    opened.keys("Enter")
    check(opened, LAMP)
    opened.keys("ArrowRight", "Home", " ")
    check(opened)
    opened.keys("ArrowDown", "Enter", "Home", "Enter")
    check(opened, KITE, LAMP)
    opened.keys("Escape")
    check(opened)


def test_all_messages_of_a_token(opened: Page) -> None:
    """By its dot below the word, or before it in a column; and by keys, also with a message."""
    dots = "e.ariaLabel.startsWith('Cut all messages')"
    assert sum(opened.each("#cuts .arc", dots)) == 5
    place = opened.each(
        "#cuts .arc", f"{dots} && e.ariaLabel.includes('“lamp” (token 3) to other')"
    )
    head = f"#cuts .arc:nth-of-type({place.index(True) + 2}) .head"
    opened.scroll_to("#cuts .stage")
    box, word = opened.box(head), opened.box("#cuts .word:nth-of-type(4)")
    assert opened.text("#cuts .word:nth-of-type(4)") == "lamp"
    assert 8 < box["width"] < 26 and (box["top"] > word["bottom"] or box["right"] < word["left"])
    opened.click_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    check(opened, FROM_LAMP)
    assert "lamp → all others" in opened.text("#cuts .say")
    opened.keys("Escape", "Home", "Enter")
    check(opened, LAMP)
    opened.keys("End", "ArrowLeft", "ArrowLeft", "ArrowLeft", "Enter")
    check(opened, LAMP, FROM_KITE)
    assert opened.texts("#cuts tr:has([aria-pressed='true']) td:nth-child(3)") == ["1", "all"]


def test_the_table_and_what_was_not_run(opened: Page, made: Path) -> None:
    """Messages behind the eighth go with the first alone."""
    opened.click("#cuts summary")
    cuts = read_page(made).facts["examples"][0]["cuts"]
    changes = [cuts["states"][str(n)][0] - cuts["states"][""][0] for n in range(20)]
    for column, wanted in ((4, changes), (5, [-row["effect"] for row in cuts["rows"]])):
        found = map(number, opened.texts(f"#cuts td:nth-child({column}).number"))
        assert list(found) == pytest.approx(wanted, rel=6e-3)
    opened.click("#cuts tr:nth-child(12) button")
    before = opened.texts("#cuts .bars", "innerText")
    assert opened.count("#cuts td [aria-disabled='true']") == 18
    opened.focus("#cuts tr:nth-child(5) button")
    opened.keys("Enter")
    assert opened.texts("#cuts .bars", "innerText") == before
    assert "There is no run without both" in opened.text("#cuts .why")
    opened.click("#cuts tr:nth-child(1) button")
    assert opened.count(".arc.cut") == 2


def test_the_address_opens_a_cut(page: Page, view: int, made: Path) -> None:
    page.goto(f"{made.as_uri()}#cut=1.3.13,1.8.13")
    check(page, LAMP, KITE)
    page.click("#cuts .heal")
    page.evaluate("history.back()")
    page.wait_for("document.querySelectorAll('.arc.cut').length === 2")
    check(page, LAMP, KITE)
    page.evaluate("location.hash = 'cut=1.3.13,9.9.9'")
    page.wait_for("document.querySelectorAll('.arc.cut').length === 0")
    assert "has no run for" in page.text("#cuts .why")
    assert page.errors == [] and {url.partition("#")[0] for url in page.requests} == {made.as_uri()}
