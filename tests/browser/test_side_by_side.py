"""Insights: several methods and models side by side, words by pointing and keys, kept pages."""

from __future__ import annotations

from typing import Any

from browser.made import sentences
from helpers.browser import Page
from helpers.insights_examples import Always, numbers, table

from captum_ssm.insights import AttributionVisualizer

WORDS = ["the", "lamp", "<b>kite</b>", "owns", "anna", "שלום", "."]
FROZEN, CENTRED = (("LatimFlow", {"rule": rule}) for rule in ("frozen", "centred"))


IDS = [[0, 1, 3, 4, 2], [4, 3, 0, 5, 6]]


def texts_of(count: int = 2, **chosen: Any) -> AttributionVisualizer:
    """A visualizer of sentences and so many models."""
    return sentences(IDS, WORDS, count, **chosen)


def percents(page: Page, flow: str) -> list[float]:
    return page.each(f"{flow} .token", "Number(e.dataset.percent)")


def test_methods_are_added_and_taken_away_by_keys(shown):
    visualizer = texts_of()
    page = shown(visualizer)
    page.focus("#add-method")
    page.keys("Enter")
    assert page.focused() == "select#method-2"
    page.focus("#argument-rule-2")
    page.keys("End", "Enter")  # in a list it sends nothing
    page.focus("#show")
    page.keys("Enter")
    page.wait_for("document.querySelectorAll('article:first-child .by').length === 4")
    rest = {"contrast": None, "baselines": None, "zero_bias": False}
    assert visualizer.config.methods == [(name, rule | rest) for name, rule in (FROZEN, CENTRED)]
    page.focus(".remove")
    page.keys(" ")
    assert page.focused() == "button#add-method" and page.count(".choice") == 1
    for _ in range(3):
        page.keys("Enter")
        page.focus("#add-method")
    assert page.evaluate("document.querySelector('#add-method').disabled")


def test_a_class_is_explained_by_all_methods_of_its_model(shown):
    page = shown(texts_of(2, beside=[CENTRED]))
    before = [percents(page, f"section:nth-child({i}) > .methods") for i in (1, 2)]
    page.click("section:nth-child(2) .predicted button:nth-child(3)")
    page.wait_for("document.querySelector('#status').textContent === 'Explained.'")
    after = [percents(page, f"section:nth-child({i}) > .methods") for i in (1, 2)]
    assert after[0][: len(WORDS)] == before[0][: len(WORDS)]
    assert page.count("article:first-child section:nth-child(2) .by") == 2
    assert after[1] != before[1]


def test_a_contrast_is_a_word_or_a_class(shown):
    visualizer = texts_of(1)
    page = shown(visualizer)
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


def test_a_word_that_is_pointed_at_says_its_value(shown, page, view):
    page = shown(texts_of(1), width=view)
    wanted = percents(page, "article:first-child .flow")
    page.hover("article:first-child .token:nth-child(2)")
    page.wait_for("!document.querySelector('#tip').hidden")
    assert page.text("#tip") == f"“lamp”: {wanted[1]:.3f} in hundredths of the strongest"
    box, word = (
        page.evaluate(f"document.querySelector('{s}').getBoundingClientRect().toJSON()")
        for s in ("#tip", ".token.current")
    )
    assert box["left"] >= 0 and box["right"] <= view and box["top"] >= 0
    assert box["top"] >= word["bottom"] or box["bottom"] <= word["top"]
    page.leave()
    page.wait_for("document.querySelector('#tip').hidden")
    assert page.overflow() == 0


def test_without_labels_it_says_so(shown):
    page = shown(table(Always(1), [numbers(None, None)]))
    assert page.texts("h3") == ["Always, no label was given"] * 2
    assert "No labels were given" in page.text("#status")
    page.focus("#prediction")
    page.keys("c")  # correct
    page.click("#show")
    page.wait_for("document.querySelectorAll('article').length === 0")
    page.settle()
    said = page.text("#status")
    assert "None passes the filter. No labels were given" in said


def test_a_kept_page_shows_what_the_served_one_does(shown, view):
    visualizer = texts_of(2, beside=[CENTRED])
    served = shown(visualizer, width=view)
    wanted = served.texts(".by"), percents(served, "main"), served.texts(".predicted button")
    kept = shown(visualizer, kept=True, width=view)
    assert (kept.texts(".by"), percents(kept, "main"), kept.texts(".predicted button")) == wanted
    assert kept.requests == [kept.evaluate("location.href")]
    assert kept.is_hidden("#choices")
    assert not kept.is_hidden("#kept")
    assert kept.count(".cutting") == 0 and kept.overflow() == 0
    before = kept.style("body", "background-color")
    kept.click("#theme")
    assert kept.style("body", "background-color") != before


def test_classes_of_a_kept_page_are_chosen_by_keys(shown):
    page = shown(texts_of(1), kept=True)
    buttons = "[...document.querySelectorAll('article:first-child .predicted button')]"
    assert page.evaluate(f"{buttons}.map((b) => b.disabled)") == [False, False, True, True]
    before = percents(page, "article:first-child")
    page.evaluate(f"{buttons}[1].focus()")
    page.keys("Enter")
    page.wait_for(f"{buttons}[1].ariaPressed === 'true'")
    assert page.evaluate("document.activeElement.ariaPressed") == "true"
    assert percents(page, "article:first-child") != before
    page.evaluate(f"{buttons}[0].focus()")
    page.keys(" ")
    page.wait_for(f"{buttons}[0].ariaPressed === 'true'")
    assert percents(page, "article:first-child") == before
