"""The first screen of a report: what is explained, its strongest tokens, and what enters layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser.made import PROMPT, number, of_recall
from captum.attr import IntegratedGradients
from helpers.browser import Page
from helpers.pages import read_page

from captum_ssm import ImplicitAttentionRollout, LatimFlow
from captum_ssm.models import load_bundled


def shown_numbers(page: Page) -> dict[str, float]:
    """The numbers of the list of strongest tokens, by what stands before them."""
    found = {}
    for row in page.texts("#strongest tr", "innerText"):
        *name, value = row.split("\t")
        found[" ".join(" ".join(name).split())] = number(value)
    return found


PAGE = "readme"
STARTED = (
    r"Start (\S+): constants of the model and the method, which belong to no token "
    r"\(references (\S+), biases (\S+)\)\. Tokens add (\S+)\. End: logit (\S+)\."
)
MODEL, VOCABULARY = load_bundled()
IDS = torch.tensor([VOCABULARY.encode(PROMPT)])


@pytest.fixture
def example(made: Path) -> dict[str, Any]:
    """What the page holds."""
    (found,) = read_page(made).facts["examples"]
    return found


def test_the_first_screen_tells_the_story(wide: Page, example: dict[str, Any]) -> None:
    """Prediction, coloured tokens, the strongest and their sum, without scrolling."""
    for selector in ("#targets", "#explained", "#text", "#sum", "#strongest tfoot"):
        place = wide.box(selector)
        assert 0 <= place["top"] < place["bottom"] <= 800, selector
        assert 0 <= place["left"] < place["right"] <= 1280, selector
    assert wide.text("#targets :has(:checked) .name") == "lamp"
    strongest = wide.box(".token[data-index='3']")
    assert 0 < strongest["top"] < strongest["bottom"] < 800
    flow = np.array(example["methods"][0]["values"])
    check(wide, flow, f"Relevance for {example['explained']}")
    said = re.fullmatch(STARTED, wide.text("#sum"))
    assert said is not None
    start, references, biases, tokens, logit = map(number, said.groups())
    assert tokens + start == pytest.approx(logit, abs=0.15)
    assert references + biases == pytest.approx(start, abs=0.15)
    assert logit == pytest.approx(example["predictions"][example["asked"]]["logit"], abs=0.06)
    assert tokens == pytest.approx(float(flow.sum()), abs=0.06)
    listed = shown_numbers(wide)
    assert sum(listed.values()) - listed["= logit"] == pytest.approx(listed["= logit"], rel=0.01)


def test_the_list_leads_from_the_start_to_the_output(opened: Page) -> None:
    """Each bar begins where the one above ends, for two predictions that keys choose."""
    for keys in (["Tab", "Tab"], ["ArrowRight"]):
        opened.keys(*keys)
        values = list(shown_numbers(opened).values())
        ends = np.cumsum(values[:-1])
        assert ends[-1] == pytest.approx(values[-1], abs=0.005 * max(map(abs, values)))
        sides = "(b => [b.left, b.right])(e.getBoundingClientRect())"
        bars = np.array(opened.each("#strongest .bar", sides))
        unit = (bars[-1, 0] - bars[0, 0]) / (ends[-1] - ends[0])  # between both ticks
        assert len(bars) == len(values) and abs(unit) > 1
        for (left, right), end, value in zip(bars[1:-1], ends[1:], values[1:-1], strict=True):
            exact = sorted(bars[0, 0] + unit * (x - ends[0]) for x in (end - value, end))
            np.testing.assert_allclose([left, right], exact, atol=1.5)


def test_a_sum_that_starts_at_the_baseline_or_is_unknown(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "integrated.html"
    name = "Integrated Gradients"
    given: dict[str, Any] = {"options": {name: {"n_steps": 300}}, "matrices": False}
    of_recall(path, methods=[IntegratedGradients, ImplicitAttentionRollout], **given)
    (example,) = read_page(path).facts["examples"]
    told, logit = example["methods"][0]["sum"], example["predictions"][0]["logit"]
    assert told["adds_up"]
    page.goto(path)
    said = re.match(
        r"Start (\S+): the output for the baseline\. Tokens add (\S+)\. ", page.text("#sum")
    )
    assert said is not None
    assert number(said[1]) == pytest.approx(logit - told["wanted"], abs=0.06)
    assert number(said[2]) == pytest.approx(told["total"], abs=0.06)
    assert shown_numbers(page)["Start (baseline)"] == pytest.approx(number(said[1]), abs=0.06)
    page.click("#methods label:last-of-type")
    assert page.text("#sum").startswith("Relevance sums to") and page.count(".tick") == 0


def test_a_click_on_a_chip_explains_that_prediction(opened: Page, example: dict[str, Any]) -> None:
    rival = 1 + [p["label"] for p in example["predictions"][1:]].index("anna")
    opened.click(f"#targets .chip:nth-of-type({rival + 1})")
    found = LatimFlow(MODEL).attribute(IDS, (-1, VOCABULARY.id_of("anna")))[0].numpy()
    check(opened, found, "Relevance for the logit of “anna”, predicted after token 13")
    assert "This part explains only “lamp”." in opened.text("#flow")
    # methods that were asked for one say so
    assert "explains only" not in opened.text("#sum") and opened.count(".astray") == 1
    opened.click("#methods label:last-of-type")
    assert opened.text("#sum").endswith("This method explains only “lamp”.")


def test_one_prediction_rather_than_another_by_keyboard(
    wide: Page, example: dict[str, Any]
) -> None:
    """The difference on the page is what the method says of the contrast."""
    wide.keys("Tab", "Tab", "Tab", "ArrowRight")
    name = wide.text("#rivals :has(:focus)")
    assert name == "kite"  # of the text, and behind "the" there: none of the likeliest
    target, rival = ((-1, VOCABULARY.id_of(word)) for word in ("lamp", name))
    found = LatimFlow(MODEL).attribute(IDS, target, contrast=rival)[0].numpy()
    said = (
        f"Relevance for the logit of “lamp” minus the logit of “{name}”, predicted after token 13"
    )
    check(wide, found, said)
    assert "= logit difference" in wide.text("#strongest tfoot")
    wide.keys("ArrowLeft")  # back to what was asked
    assert wide.text("#explained") == example["explained"]


def test_a_copied_text_has_its_spaces(wide: Page) -> None:
    copied = "getSelection().selectAllChildren(document.querySelector('#text'))"
    assert wide.evaluate(f"({copied}, getSelection().toString().trim())") == PROMPT


def test_of_a_long_text_the_strongest_sentence_is_first(
    page: Page, view: int, written: Callable[[str], Path]
) -> None:
    path = written("sentences")
    (example,) = read_page(path).facts["examples"]
    page.goto(path)
    values = np.array(example["methods"][0]["values"])
    sums = np.add.reduceat(values, example["sentences"])
    rows = page.texts("#sentences li", "innerText")
    best, ends = int(np.abs(sums).argmax()), [*example["sentences"], len(values)]
    told, said = rows[0].split("\n")
    assert said.split() == example["tokens"][slice(*ends[best : best + 2])]
    assert number(told) == pytest.approx(sums[best], rel=6e-3)
    assert page.box("#sentences li")["bottom"] < 800
    page.click("#sentences .jump")
    assert page.text(".token[aria-pressed=true]") in said.split()
    # strips are of square roots: a tenth of the largest has a third of its shade
    share = np.sort(np.abs(values))[-2] / np.abs(values).max()
    strip = "document.querySelector('#methods canvas')"
    data = f"{strip}.getContext('2d').getImageData(0, 0, {strip}.width, 1).data"
    shades = sorted(page.evaluate(f"[...{data}].filter((_, i) => i % 4 === 3)"))
    assert shades[-2] / shades[-1] == pytest.approx(share**0.5, abs=0.02)


@pytest.mark.usefixtures("view")
def test_a_drag_and_two_buttons_zoom_into_a_long_text(
    page: Page, written: Callable[[str], Path]
) -> None:
    path = written("sentences")
    (example,) = read_page(path).facts["examples"]
    size, begun = len(example["tokens"]), example["sentences"][1:]
    page.goto(path)
    strip, layers = "#methods canvas", "#entering canvas"
    marks = f"document.querySelector('{strip}').style.background.split('gradient').length - 1"
    assert page.text("#zoomed") == f"all {size} tokens" and page.evaluate(marks) == len(begun)
    before = page.evaluate("document.querySelector('#methods :checked').value")
    kept = "document.querySelector('.token[aria-pressed=true]')"
    for selector, half in ((strip, size / 2), (layers, size / 4)):
        page.evaluate(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
        box = page.box(selector)
        middle = box["top"] + box["height"] / 2
        page.drag((box["left"] + box["width"] / 2, middle), (box["right"] - 1, middle))
        first, last = map(int, re.findall(r"\d+", page.text("#zoomed")))
        assert last in (size - 1, size - 2) and first == pytest.approx(size - half, abs=2)
        assert page.evaluate(f"{kept} === null")  # it was no click
    assert page.evaluate("document.querySelector('#methods :checked').value") == before
    assert page.evaluate(marks) == sum(first < at <= last for at in begun)
    canvas = f"document.querySelector('{layers}')"
    width = page.evaluate(f"{canvas}.width")
    assert width == last + 1 - first
    # what is pointed at is of the tokens that are shown
    page.evaluate(f"{canvas}.scrollIntoView({{block: 'center'}})")
    page.move_to(box["left"] + 2, page.box(layers)["top"] + 2)
    assert f"at token {first} “" in page.text("#tip")
    # a word of the list that is not shown is gone to
    page.evaluate("document.querySelector('#strongest .jump').dataset.index = 3")
    page.click("#strongest .jump")
    assert page.text("#zoomed").startswith("tokens 0 to ")
    page.focus("#wider")
    page.keys("Enter", "Enter", "Enter")
    assert page.text("#zoomed") == f"all {size} tokens"
    page.focus("#closer")
    page.keys(*["Enter"] * 5)
    assert page.text("#zoomed") == "tokens 0 to 19"  # around the one that is kept
    names = page.texts("#entering .columns bdi", "innerText")
    assert names == example["tokens"][:20]
    assert page.overflow() <= 0 and page.errors == []


def check(page: Page, relevance: np.ndarray, heading: str) -> None:
    """The page explains this, and shows its tokens."""
    assert page.text("#says") == heading
    best = np.argsort(-np.abs(relevance))[:10]
    rows = [row.split("\t") for row in page.texts("#strongest tbody tr", "innerText")]
    numbers = dict(zip((int(row[0]) for row in rows), (number(r[-1]) for r in rows), strict=True))
    assert numbers == pytest.approx({int(i): float(relevance[i]) for i in best}, rel=6e-3, abs=1e-4)


def test_the_identity_is_in_no_sum(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "identity.html"
    of_recall(path, methods=[ImplicitAttentionRollout], matrices=False)
    (example,) = read_page(path).facts["examples"]
    (rollout,) = example["methods"]
    assert rollout["own"] == 13
    page.goto(path)
    said = re.fullmatch(r"Relevance sums to (\S+)\.", page.text("#sum"))
    assert said is not None
    total = sum(rollout["values"][:13])
    assert number(said[1]) == pytest.approx(total, rel=6e-3)
    listed = shown_numbers(page)
    assert not any(name.startswith("13 ") for name in listed)
    assert sum(listed.values()) == pytest.approx(total, rel=1e-2, abs=1e-2)


@pytest.mark.usefixtures("view")
def test_a_text_of_many_lines(page: Page, written: Callable[[str], Path]) -> None:
    path = written("lines")
    (example,) = read_page(path).facts["examples"]
    sizes = np.abs(example["methods"][0]["values"])
    order = np.argsort(-sizes)
    page.goto(path)
    page.drawn()

    def in_view(index: int) -> bool:
        token, text = page.box(f".token[data-index='{index}']"), page.box("#text")
        inside = text["top"] <= token["top"] < token["bottom"] <= text["bottom"]
        return inside and 0 <= token["top"] < token["bottom"] <= 800

    assert 200 < order[0] < 400 and page.evaluate("scrollY") == 0
    assert in_view(int(order[0]))
    # a button of the list shows its token
    other = int(order[7])
    page.click(f"#strongest .jump[data-index='{other}']")
    page.evaluate("scrollTo(0, 0)")
    page.drawn()
    assert in_view(other)
    pressed = "document.querySelector('.token[aria-pressed=true]').dataset.index"
    assert page.evaluate(pressed) == str(other)
    # and so do strips: in the middle of one of 320 cells of two tokens each
    page.click("#methods canvas")
    strongest = [start + int(sizes[start : start + 2].argmax()) for start in (318, 320)]
    assert int(page.evaluate(pressed)) in strongest
    assert page.text("#tip").startswith(tuple(f"Token {i} “word{i}”" for i in strongest))
    # of the graph, words without nodes are left out
    words = page.texts(".graph svg text:not(.row, .along)")
    shown = {int(word.removeprefix("word")) for word in words if word != "⋮"}
    assert shown >= {node["position"] for node in example["graph"]["nodes"]}
    assert len(shown) <= 40 and "⋮" in words
    assert page.overflow() <= 0 and page.errors == []


def test_what_enters_each_layer(opened: Page) -> None:
    streams = LatimFlow(MODEL).decompose(IDS, (-1, VOCABULARY.id_of("lamp"))).streams
    assert opened.texts("#entering .rows bdi", "innerText") == ["layer 1", "layer 0"]
    assert opened.texts("#entering .columns bdi", "innerText") == PROMPT.split()
    assert opened.texts("#overview .rows bdi", "innerText") == PROMPT.split()
    assert opened.text("#layer-name").startswith("Layer 1 of 0–1")  # where the lamp is fetched
    picture = opened.box("#entering canvas")
    for layer, token in [(0, 1), (1, 3), (0, 13)]:
        x = picture["left"] + (token + 0.5) / 14 * picture["width"]
        y = picture["top"] + (1.5 - layer) / 2 * picture["height"]
        event = f"new PointerEvent('pointermove', {{clientX: {x}, clientY: {y}}})"
        opened.evaluate(f"document.querySelector('#entering canvas').dispatchEvent({event})")
        text = opened.text("#tip")
        match = re.fullmatch(rf"Input of layer {layer} at token {token} “\w+”: (\S+)", text)
        assert match is not None, text
        exact = float(streams[layer][0, token])
        assert number(match[1]) == pytest.approx(exact, rel=6e-3, abs=1e-3)
    opened.click("#entering canvas")  # between the layers, at the middle token
    kept = opened.evaluate("document.querySelector('.token[aria-pressed=true]').dataset.index")
    assert kept in ("6", "7")
