"""Insights: several methods and models side by side, words by pointing and keys, kept pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chromium import Page
from helpers.insights_examples import Always, numbers, softmax, table
from zoo.small import mamba_lm

from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature

pytestmark = pytest.mark.browser

WORDS = ["the", "lamp", "<b>kite</b>", "owns", "anna", "שלום", "."]
FROZEN, CENTRED = (("LatimFlow", {"rule": rule}) for rule in ("frozen", "centred"))
READY = (
    "!document.querySelector('main').hasAttribute('aria-busy')"
    " && document.querySelector('#status').textContent !== ''"
)
Opening = Callable[..., Page]


def texts_of(count: int = 2, **chosen: Any) -> AttributionVisualizer:
    """A visualizer of sentences and so many models."""
    models = [mamba_lm(vocab_size=len(WORDS)) for _ in range(count)]
    feature = TextFeature("prompt", None, None, lambda ids: [WORDS[i] for i in ids[0]])
    batch = Batch(torch.tensor([[0, 1, 3, 4, 2], [4, 3, 0, 5, 6]]), None)
    visualizer = AttributionVisualizer(models, WORDS, feature, [batch], softmax)
    visualizer.config = FilterConfig(*FROZEN, **chosen)
    return visualizer


@pytest.fixture
def opened(page: Page, tmp_path: Path) -> Iterator[Opening]:
    """Opens a visualizer's page, served or kept, and in the end finds that all went well there."""
    served: list[AttributionVisualizer] = []

    def open_(visualizer: AttributionVisualizer, *, kept: bool = False, width: int = 1280) -> Page:
        served.append(visualizer)
        page.resize(width, 800)
        if kept:
            path = tmp_path / "kept.html"
            visualizer.snapshot(path)
            page.goto(path)
        else:
            visualizer.serve()
            page.goto(visualizer.url)
        page.wait_for(READY)
        return page

    yield open_
    assert page.errors == [] and page.dialogs == []
    assert all(url.startswith(("file:", "http://127.0.0.1:")) for url in page.requests)
    for visualizer in served:
        visualizer.close()


def texts(page: Page, selector: str) -> list[str]:
    found = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    return [str(text) for text in found]


def percents(page: Page, flow: str) -> list[float]:
    found = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(flow + ' .token')})]"
        ".map((w) => Number(w.dataset.percent))"
    )
    return [float(number) for number in found]


# --- methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 1280])
def test_methods_stand_beside_each_other_under_their_model(opened, width):
    page = opened(texts_of(1, beside=[("ImplicitAttentionRollout", {})]), width=width)
    assert texts(page, "article:first-child .by") == [
        "by LatimFlow, rule frozen",
        "by ImplicitAttentionRollout",
    ]
    assert page.count("article:first-child .predicted") == 1
    tops = page.evaluate(
        "[...document.querySelectorAll('article:first-child .methods > div')]"
        ".map((e) => e.getBoundingClientRect().top)"
    )
    assert (tops[0] == tops[1]) == (width == 1280)
    assert page.overflow() == 0


def test_methods_are_added_and_taken_away_by_keys(opened):
    visualizer = texts_of()
    page = opened(visualizer)
    page.evaluate("document.querySelector('#add-method').focus()")
    page.key("Enter")
    assert page.focused() == "select#method-2"
    page.evaluate("document.querySelector('#argument-rule-2').focus()")
    page.key("End")
    page.key("Enter")  # in a list it sends nothing
    page.evaluate("document.querySelector('#show').focus()")
    page.key("Enter")
    page.wait_for("document.querySelectorAll('article:first-child .by').length === 4")
    assert visualizer.config.methods == [
        ("LatimFlow", FROZEN[1] | {"contrast": None, "baselines": None, "zero_bias": False}),
        ("LatimFlow", CENTRED[1] | {"contrast": None, "baselines": None, "zero_bias": False}),
    ]
    page.evaluate("document.querySelector('.remove').focus()")
    page.key(" ")
    assert page.focused() == "button#add-method" and page.count(".choice") == 1
    for _ in range(3):
        page.key("Enter")
        page.evaluate("document.querySelector('#add-method').focus()")
    assert page.evaluate("document.querySelector('#add-method').disabled")
    page.click(".choice:nth-child(2) .remove")
    assert page.count(".choice") == 3


def test_a_class_is_explained_by_all_methods_of_its_model(opened):
    page = opened(texts_of(2, beside=[CENTRED]))
    before = [percents(page, f"section:nth-child({i}) > .methods") for i in (1, 2)]
    page.click("section:nth-child(2) .predicted button:nth-child(3)")
    page.wait_for("document.querySelector('#status').textContent === 'Explained.'")
    after = [percents(page, f"section:nth-child({i}) > .methods") for i in (1, 2)]
    assert after[0][: len(WORDS)] == before[0][: len(WORDS)]
    assert page.count("article:first-child section:nth-child(2) .by") == 2
    assert after[1] != before[1]


def test_a_method_that_fails_leaves_the_others(opened):
    page = opened(texts_of(1, beside=[("Saliency", {})]))
    assert "integers" in page.text("article:first-child .methods .error")
    assert page.count("article:first-child .flow") == 1
    assert page.count("article:first-child .predicted button") > 1


def test_a_contrast_is_a_word_or_a_class(opened):
    visualizer = texts_of(1)
    page = opened(visualizer)
    before = percents(page, "article:first-child")
    page.click("#argument-contrast")
    page.type("kit")
    valid = "document.querySelector('#choices').checkValidity()"
    assert not page.evaluate(valid)
    offered = "[...document.querySelectorAll('#known-contrasts option')].map((o) => o.value)"
    assert page.evaluate(offered) == ["<b>kite</b>"]
    page.evaluate("document.querySelector('#argument-contrast').select()")
    page.type("<b>kite</b>")
    assert page.evaluate(valid)
    page.click("#show")
    page.wait_for("document.querySelector('.by').textContent.includes('contrast <b>kite</b>')")
    assert visualizer.config.attribution_arguments["contrast"] == "<b>kite</b>"
    assert percents(page, "article:first-child") != before and page.count(".error") == 0


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_word_that_is_pointed_at_says_its_value(opened, page, width, scheme):
    page.prefer(scheme)
    page = opened(texts_of(1), width=width)
    wanted = percents(page, "article:first-child .flow")
    page.hover("article:first-child .token:nth-child(2)")
    page.wait_for("!document.querySelector('#tip').hidden")
    assert page.text("#tip") == f"“lamp”: {wanted[1]:.3f} in hundredths of the strongest"
    box, word = (
        page.evaluate(f"document.querySelector('{s}').getBoundingClientRect().toJSON()")
        for s in ("#tip", ".token.current")
    )
    assert box["left"] >= 0 and box["right"] <= width and box["top"] >= 0
    assert box["top"] >= word["bottom"] or box["bottom"] <= word["top"]
    page.leave()
    page.wait_for("document.querySelector('#tip').hidden")
    assert page.overflow() == 0


def test_words_are_gone_through_by_keys(opened):
    page = opened(texts_of(1))
    wanted = percents(page, "article:first-child .flow")
    page.evaluate("document.querySelector('.flow').focus()")
    for key, index in [("ArrowRight", 0), ("ArrowRight", 1), ("End", 4), ("ArrowLeft", 3)]:
        page.key(key)
        assert f": {wanted[index]:.3f} in" in page.text("#tip")
        assert page.count(".token.current") == 1
    page.key("Home")
    assert page.text("#tip").startswith("“the”")
    page.key("Escape")
    assert page.evaluate("document.querySelector('#tip').hidden")
    page.key("ArrowLeft")
    page.key("Tab")
    assert page.evaluate("document.querySelector('#tip').hidden")
    assert page.count(".token.current") == 0


# --- labels --------------------------------------------------------------------------------------


def test_without_labels_it_says_so(opened):
    page = opened(table(Always(1), [numbers(None, None)]))
    assert texts(page, "h3") == ["Always, no label was given"] * 2
    assert "No labels were given" in page.text("#status")
    page.evaluate("document.querySelector('#prediction').focus()")
    page.key("c")  # correct
    page.click("#show")
    page.wait_for("document.querySelectorAll('article').length === 0")
    page.wait_for(READY)
    said = page.text("#status")
    assert "None passes the filter. No labels were given" in said


def test_some_labels_are_told_from_none(opened):
    page = opened(table(Always(1), [numbers(1), numbers(None)]))
    assert texts(page, "h3") == ["Always, correct", "Always, no label was given"]
    assert "No labels" not in page.text("#status")


# --- kept pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_kept_page_shows_what_the_served_one_does(opened, page, width, scheme):
    page.prefer(scheme)
    visualizer = texts_of(2, beside=[CENTRED])
    served = opened(visualizer, width=width)
    wanted = texts(served, ".by"), percents(served, "main"), texts(served, ".predicted button")
    kept = opened(visualizer, kept=True, width=width)
    assert (texts(kept, ".by"), percents(kept, "main"), texts(kept, ".predicted button")) == wanted
    assert kept.requests == [kept.evaluate("location.href")]
    assert kept.evaluate("document.querySelector('#choices').hidden")
    assert not kept.evaluate("document.querySelector('#kept').hidden")
    assert kept.count(".cutting") == 0 and kept.overflow() == 0
    before = kept.style("body", "background-color")
    kept.click("#theme")
    assert kept.style("body", "background-color") != before


def test_classes_of_a_kept_page_are_chosen_by_keys(opened):
    page = opened(texts_of(1), kept=True)
    buttons = "[...document.querySelectorAll('article:first-child .predicted button')]"
    assert page.evaluate(f"{buttons}.map((b) => b.disabled)") == [False, False, True, True]
    before = percents(page, "article:first-child")
    page.evaluate(f"{buttons}[1].focus()")
    page.key("Enter")
    page.wait_for(f"{buttons}[1].ariaPressed === 'true'")
    assert page.evaluate("document.activeElement.ariaPressed") == "true"
    assert percents(page, "article:first-child") != before
    page.evaluate(f"{buttons}[0].focus()")
    page.key(" ")
    page.wait_for(f"{buttons}[0].ariaPressed === 'true'")
    assert percents(page, "article:first-child") == before
