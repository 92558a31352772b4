"""The page of Insights, as a person uses it, served or kept."""

from __future__ import annotations

import json

import pytest
from browser.made import sentences
from helpers.browser import Page
from helpers.insights_examples import CLASSES, Always, numbers, table, table_model

from captum_ssm.attr.catalogue import QUESTIONS
from captum_ssm.insights.calculation import AttributionCalculation

HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</script>", "\"'><b>", "$x_1$",
    "zero\u200bwidth", "\u202eturned", "new\nline", "tab\t", "\x00", "", "שלום", "مرحبا",
    "👩\u200d🚀", "e\u0301", "javascript:alert(1)", "${alert(1)}", "&amp;", "__proto__",
]  # fmt: skip
SEEN = {
    "zero\u200bwidth": "zero\\u{200b}width", "\u202eturned": "\\u{202e}turned", "": "(empty)",
    "new\nline": "new\\u{a}line", "tab\t": "tab\\u{9}", "\x00": "\\u{0}",
}  # fmt: skip


def show(page: Page, button: str = "#show") -> None:
    page.click(button)
    page.settle()


def pressed(page: Page) -> list[str]:
    return [text.partition(" (")[0] for text in page.texts('[aria-pressed="true"]')]


def fill(page: Page, selector: str, text: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
    page.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
    page.type(text)


def test_the_page_shows_the_first_examples_by_itself(shown):
    page = shown(table(Always(1), [numbers(1, 0, 2, 3, 4)]))
    assert page.texts("h2") == [
        f"Example {i}: {CLASSES[label]}" for i, label in enumerate([1, 0, 2, 3], 1)
    ]
    assert page.texts("h3") == ["Always, correct", *["Always, incorrect"] * 3]
    assert page.text("#status") == "4 examples of 4 searched."
    show(page, "#next")
    assert page.texts("h2") == ["Example 5: eel"]
    assert "end of the dataset" in page.text("#status")
    show(page)
    assert page.texts("h2") == ["Example 5: eel"]
    show(page, "#next")
    assert page.texts("h2")[0] == "Example 1: bee"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_screen_answers_two_questions(page, width):
    """Of the first example, without scrolling; controls are folded."""
    visualizer = sentences(IDS, WORDS)
    visualizer._config = None  # as it begins
    with visualizer:
        visualizer.serve()
        page.resize(width, 800)
        page.goto(visualizer.url)
        page.settle()
        assert page.texts("article:first-child .by") == [
            f"{question} LatimFlow, rule {rule}" for rule, question in QUESTIONS.items()
        ]
        assert page.box("article:first-child .flow")["bottom"] < 800
        assert not page.evaluate("document.querySelector('#choosing').open")


def test_filtering_by_prediction_and_class(shown):
    page = shown(table(Always(1), [numbers(1, 0, 2, 1)]))
    page.choose("#prediction", "incorrect")
    show(page)
    assert page.texts("h2") == ["Example 2: ant", "Example 3: cat"]
    page.choose("#prediction", "all")
    fill(page, "#class", "eel")
    page.click("#add-class")
    assert page.texts("#classes li") == ["eel ×"]
    show(page)
    assert page.count("article") == 0 and "None passes the filter" in page.text("#status")
    page.click("#classes button")
    fill(page, "#class", "bee")
    show(page)
    assert page.texts("#classes li") == ["bee ×"] and page.count("article") == 4


def test_methods_and_their_arguments(shown):
    visualizer = table(table_model(), [numbers(1)])
    page = shown(visualizer)
    first = page.texts("td.number")
    fill(page, "#argument-n_steps", "3")
    page.choose("#argument-method", "riemann_left")
    show(page)
    second = page.texts("td.number")
    assert second != first
    assert visualizer.config.attribution_arguments == {"n_steps": 3, "method": "riemann_left"}
    page.choose("#method", "Saliency")
    assert page.count("#argument-n_steps") == 0
    show(page)
    assert all(float(text) >= 0 for text in page.texts("td.number"))
    page.click("#argument-abs")
    show(page)
    assert visualizer.config == ("Saliency", {"abs": False}, "all", [], 4, [])
    page.choose("#method", "Integrated Gradients")
    assert page.evaluate("document.querySelector('#argument-n_steps').value") == "3"
    show(page)
    assert page.texts("td.number") == second


def test_another_class_is_explained_where_it_is_clicked(shown):
    page = shown(table(Always(1), [numbers(1, 2)]))
    assert pressed(page) == ["bee", "bee"]
    before = page.texts("td.number")
    page.click("article:last-child .predicted button:nth-child(3)")
    page.wait_for("document.querySelector('#status').textContent === 'Explained.'")
    assert pressed(page)[0] == "bee" != pressed(page)[1]
    after = page.texts("td.number")
    assert after[:3] == before[:3] and after[3:] != before[3:]
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    # by the method that is shown, whatever else is chosen by now
    page.choose("#method", "Saliency")
    page.click("article:last-child .predicted button")
    page.wait_for(
        "document.querySelector('article:last-child .predicted button').ariaPressed === 'true'"
    )
    assert page.texts("td.number") == before


def test_two_models_side_by_side(shown):
    page = shown(table([Always(1), Always(3)], [numbers(1, 0)]))
    found = ["correct", *["incorrect"] * 3]
    assert page.texts("h3") == [f"Model {1 + i % 2}, Always, {x}" for i, x in enumerate(found)]
    assert pressed(page) == ["bee", "dog"] * 2
    boxes = page.each("article:first-child section", "e.getBoundingClientRect().top")
    assert boxes[0] == boxes[1]
    page.choose("#prediction", "correct")
    show(page)
    assert page.texts("h3") == ["Model 1, Always, correct", "Model 2, Always"]
    assert "This example does not pass the filter." in page.texts("section p")


def test_an_error_of_a_model_is_shown_in_its_place(shown, monkeypatch):
    def broken(*arguments, **options):
        raise ValueError("<b>out of order</b>")

    page = shown(table(table_model(), [numbers(1)]))
    monkeypatch.setattr(AttributionCalculation, "relevance", broken)
    show(page)
    assert page.text("section .error") == "<b>out of order</b>" and page.count("section b") == 0


def test_a_server_that_has_ended_is_told(page):
    with table(Always(1), [numbers(1)]) as visualizer:
        visualizer.serve()
        page.goto(visualizer.url)
        page.settle()
    page.click("#next")
    page.wait_for("document.querySelector('#status').classList.contains('error')")
    assert "does not answer" in page.text("#status")


def test_hostile_texts_are_text(shown):
    page = shown(sentences([list(range(len(HOSTILE)))], HOSTILE))
    assert page.texts(".token") == [SEEN.get(word, word) for word in HOSTILE]
    assert page.count("main script, main b, main img") == 0
    page.click("article details summary")
    page.wait_for("document.querySelectorAll('.numbers tr').length > 0")
    assert page.texts(".numbers th") == page.texts(".token")
    fill(page, "#class", HOSTILE[0])
    page.click("#add-class")
    assert page.texts("#classes li") == [f"{HOSTILE[0]} ×"] and page.overflow() == 0
    page = shown(sentences([[0, 1, 2]], ["שלום", "עולם", "x"]))  # which runs to the left
    places = page.each(".token", "e.getBoundingClientRect().left")
    assert places == sorted(places, reverse=True)


WORDS = ["the", "lamp", "<b>kite</b>", "owns", "anna", "שלום", "."]
FROZEN, CENTRED = (("LatimFlow", {"rule": rule}) for rule in ("frozen", "centered"))
IDS = [[0, 1, 3, 4, 2], [4, 3, 0, 5, 6]]


def percents(page: Page, flow: str) -> list[float]:
    return page.each(f"{flow} .token", "Number(e.dataset.percent)")


def test_methods_are_added_and_taken_away_by_keys(shown):
    visualizer = sentences(IDS, WORDS, 2)
    page = shown(visualizer)
    page.focus("#add-method")
    page.keys("Enter")
    assert page.focused() == "select#method-2"
    page.focus("#argument-rule-2")
    page.keys("End", "ArrowUp", "Enter")  # in a list it sends nothing
    page.focus("#show")
    page.keys("Enter")
    page.wait_for("document.querySelectorAll('article:first-child .by').length === 4")
    rest = {"contrast": None, "baselines": None, "zero_bias": False}
    assert visualizer.config.methods == [(name, rule | rest) for name, rule in (FROZEN, CENTRED)]
    page.focus(".remove")
    page.keys(" ")
    assert page.focused() == "button#add-method" and page.count(".choice") == 1


def test_a_contrast_is_a_word_or_a_class(shown):
    visualizer = sentences(IDS, WORDS)
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
    page = shown(sentences(IDS, WORDS), width=view)
    wanted = percents(page, "article:first-child .flow")
    page.hover("article:first-child .token:nth-child(2)")
    page.wait_for("!document.querySelector('#tip').hidden")
    assert page.text("#tip") == f"“lamp”: {wanted[1]:.3f} % of the strongest word"
    box, word = (
        page.evaluate(f"document.querySelector('{s}').getBoundingClientRect().toJSON()")
        for s in ("#tip", ".token.current")
    )
    assert box["left"] >= 0 and box["right"] <= view and box["top"] >= 0
    assert box["top"] >= word["bottom"] or box["bottom"] <= word["top"]
    page.leave()
    page.wait_for("document.querySelector('#tip').hidden")
    assert page.overflow() == 0


def test_a_kept_page_shows_what_the_served_one_does(shown):
    visualizer = sentences(IDS, WORDS, 2, beside=[CENTRED])
    served = shown(visualizer, width=390)
    wanted = served.texts(".by"), percents(served, "main"), served.texts(".predicted button")
    kept = shown(visualizer, kept=True, width=390)
    assert (kept.texts(".by"), percents(kept, "main"), kept.texts(".predicted button")) == wanted
    assert kept.requests == [kept.evaluate("location.href")]
    assert kept.is_hidden("#choosing") and not kept.is_hidden("#kept")
    assert kept.count(".cutting") == 0 and kept.overflow() == 0
    # its classes are chosen, too
    buttons = "article:first-child .predicted button"
    assert kept.each(buttons, "e.disabled")[:4] == [False] * 2 + [True] * 2
    before = percents(kept, "article:first-child")
    for place, same in ((2, False), (1, True)):
        kept.click(f"{buttons}:nth-child({place})")
        kept.wait_for(
            f"document.querySelector('{buttons}:nth-child({place})').ariaPressed === 'true'"
        )
        assert (percents(kept, "article:first-child") == before) == same
