"""A page of answers in a real browser, used by mouse and by keyboard."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from browser.made import PROMPT
from helpers.browser import Page

from captum_ssm import LatimFlow, SSMLLMAttribution
from captum_ssm.attr import SSMLLMAttributionResult
from captum_ssm.models import load_bundled
from captum_ssm.viz.html.generated import answers_page

ANSWER = "lamp . ? bob owns the kite ."
#: Of the answer, the words of its last sentence.
LAST = range(3, 8)


@pytest.fixture(scope="module")
def found() -> SSMLLMAttributionResult:
    model, vocabulary = load_bundled()
    explain = SSMLLMAttribution(LatimFlow(model), vocabulary)
    return explain.attribute(
        PROMPT, ANSWER, spans="word", prompt_spans="word", hops=2, contrast="mean"
    )


@pytest.fixture(scope="module")
def made(found: SSMLLMAttributionResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.html"
    path.write_text(answers_page([found, found], "Who owns what?"), encoding="utf-8")
    return path


def word(side: str, index: int) -> str:
    return f"#{side} .token:nth-of-type({index + 1})"


def assert_coloured(page: Page, prompt: torch.Tensor, answer: torch.Tensor) -> None:
    """By 64 steps of the largest of both, up to 0.62."""
    largest = max(float(x.abs().max()) for x in (prompt, answer))
    for side, values in (("prompt", prompt), ("answer", answer)):
        wanted = np.round(values.abs().numpy() / largest * 64) / 64 * 0.62
        shown = page.opacities(f"#{side} .token")
        np.testing.assert_allclose(shown, wanted, atol=0.011)


def last(found: SSMLLMAttributionResult) -> tuple[torch.Tensor, torch.Tensor]:
    hop = found.spans.hops[-1]
    return hop.prompt, hop.text + hop.unresolved


def test_pointing_colours_what_a_word_is_due_to(
    opened: Page, found: SSMLLMAttributionResult
) -> None:
    prompt, answer = last(found)
    assert_coloured(opened, prompt.sum(0), answer.sum(0))
    assert opened.text("#status").startswith("The whole answer depends most on")
    opened.hover(word("answer", 6))
    assert_coloured(opened, prompt[6], answer[6])
    best = PROMPT.split()[int(prompt[6].argmax())]
    assert opened.text("#status").startswith(f"“kite” depends most on “{best}” +")
    assert opened.text("#strongest li").split()[0] == best == "kite"
    sums = [prompt[6].sum(), answer[6].sum(), found.spans.hops[-1].constants[6]]
    said = opened.text("#sum").replace("−", "-").rstrip(".")
    numbers = [float(x) for x in re.findall(r"[-+]?\d[\d.]*", said.replace(". ", " "))]
    np.testing.assert_allclose(numbers, [*map(float, sums), float(sum(sums))], rtol=6e-3)
    opened.click("#whole")
    assert_coloured(opened, prompt.sum(0), answer.sum(0))


def test_arcs_lead_from_the_strongest_sources(opened: Page, found: SSMLLMAttributionResult) -> None:
    """In one text, whose end is marked as the answer, and by keys alone."""
    copied = "getSelection().selectAllChildren(document.querySelector('#text'))"
    text = opened.evaluate(f"({copied}, getSelection().toString())").split()
    assert text == [*PROMPT.split(), *ANSWER.split()]
    assert {x for x in opened.each("#answer .token", "getComputedStyle(e).borderBottomStyle")} == {
        "solid"
    }
    assert opened.texts("#answer .token") == ANSWER.split()
    assert len(arcs(opened)) == 8  # one for each word of the whole answer
    opened.focus("#text .token[tabindex='0']")
    opened.keys("End", "ArrowLeft", "Enter")  # kite, of the answer
    prompt, answer = last(found)
    values = torch.cat([prompt[6], answer[6]]).numpy()
    best = np.argsort(-np.abs(values))[:6]
    drawn = arcs(opened)
    assert {(source, target) for source, target, _, _ in drawn} == {(int(i), 20) for i in best}
    shares = np.abs(values) / np.abs(values).max()
    for source, _, width, against in drawn:
        assert width == pytest.approx(1.25 + 4.75 * shares[source], abs=0.01)
        assert against == (values[source] < 0)
    # of a word of the prompt, to those words of the answer to which it adds most
    opened.keys("Home", *["ArrowRight"] * 8, "Enter")
    assert {source for source, *_ in arcs(opened)} == {8}
    assert all(target >= 14 for _, target, _, _ in arcs(opened))
    opened.resize(700, 800)
    assert {source for source, *_ in arcs(opened)} == {8}


def arcs(page: Page) -> list[tuple[int, int, float, bool]]:
    """The words under an arc's ends, its width, and whether its color says that it takes away."""
    page.drawn()
    width = "Number(e.firstChild.getAttribute('stroke-width'))"
    path = "e.firstChild.getAttribute('d').match(/[-0-9.]+/g).map(Number)"
    drawn = page.each("#text .arcs g", f"[{path}, {width}, e.classList.contains('against')]")
    places = page.each("#text .token", "[e.offsetLeft, e.offsetTop, e.offsetWidth, e.offsetHeight]")
    x = np.array([left + wide / 2 for left, _, wide, _ in places])
    y = np.array([top + high / 2 for _, top, _, high in places])

    def under(left: float, top: float) -> int:
        return int(np.hypot(x - left, y - top).argmin())

    return [(under(*d[:2]), under(*d[-2:]), width, against) for d, width, against in drawn]


def test_sentences_are_sums_of_their_words(opened: Page, found: SSMLLMAttributionResult) -> None:
    prompt, answer = last(found)
    opened.click("#stretch [value=sentences]")
    opened.hover(word("answer", 5))
    assert_coloured(opened, prompt[3:8].sum(0), answer[3:8].sum(0))
    assert opened.count("#answer .current") == len(LAST)
    assert opened.text("#status").startswith("“bob owns the kite .” depends most on")
    opened.click("#shades [value=sentences]")
    opened.hover(word("answer", 5))
    coloured = opened.opacities("#prompt .token")
    assert len(set(coloured[5:10])) == 1 and coloured[7] > 0
    assert opened.text("#strongest li").startswith("bob owns the kite .")


def test_a_word_that_is_kept(opened: Page, found: SSMLLMAttributionResult) -> None:
    """By its hops, its strongest words, and the table; a word of the prompt shows what it gives."""
    opened.hover(word("prompt", 8))
    assert_coloured(opened, torch.zeros(14), last(found)[0][:, 8])
    assert opened.text("#strongest-title") == "Adds most to"
    opened.click(word("answer", 6))
    opened.click("#strongest button")
    assert opened.count("#prompt .found") == 1 and opened.text(".found") == "kite"
    assert opened.text("#hops-said") == "2 times"
    opened.focus("#hops")
    for said, hop in (("once", 1), ("not at all", 0)):
        opened.keys("ArrowLeft")
        assert opened.text("#hops-said") == said
        parts = found.spans.hops[hop]
        assert_coloured(opened, parts.prompt[6], (parts.text + parts.unresolved)[6])
    opened.click("#numbers summary")
    opened.wait_for("document.querySelectorAll('#numbers-table tbody tr').length > 0")
    assert opened.count("#numbers-table tbody tr") == 14 + 8
    opened.leave()  # scrolling could bring a word under the mouse
    opened.focus("#example")
    opened.keys("ArrowDown")
    assert opened.text("#status").startswith("The whole answer")
