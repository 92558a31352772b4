"""Edges in a report and in Insights, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chromium import Page
from helpers.insights_examples import Always, numbers, softmax, table
from helpers.pages import read_page
from zoo.small import VOCABULARY, mamba_lm, token_ids

from captum_ssm import EdgeEffects, Edges, ImplicitAttentionRollout, LatimFlow, knock_out, report
from captum_ssm.insights import AttributionVisualizer, Batch, TextFeature

pytestmark = pytest.mark.browser

HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "שלום", "", "<!--"]
WORDS = [*HOSTILE, *(f"w{i}" for i in range(VOCABULARY - len(HOSTILE)))]


def of_all(page: Page, selector: str) -> list[str]:
    """The texts of all that is selected."""
    found = f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent)"
    return list(page.evaluate(found))


def choose(page: Page, selector: str, value: int) -> None:
    """Chooses in a list as its own popup would."""
    page.evaluate(
        f"""(() => {{
          const list = document.querySelector('{selector}');
          list.value = {value};
          list.dispatchEvent(new Event('change', {{bubbles: true}}));
        }})()"""
    )


# --- in a report ---------------------------------------------------------------------------------


def test_a_report_lists_the_strongest(page: Page, tmp_path: Path) -> None:
    path, ids = tmp_path / "edges.html", token_ids(2, 9)
    report(mamba_lm(), ids, [LatimFlow], tokens=[WORDS[:9], WORDS[4:13]], edges=4, path=path)
    page.goto(path)
    assert of_all(page, "#edges thead th")[-2:] == ["Estimated effect of cutting", "True effect"]
    for number, example in enumerate(read_page(path).facts["examples"]):
        choose(page, "#example", number)
        cells = of_all(page, "#edges tbody td")
        tokens, rows = example["tokens"], example["edges"]["rows"]
        assert len(rows) == 4
        for place, row in enumerate(rows):
            *ends, effect, true = cells[7 * place : 7 * place + 7]
            source, target = row["source"], row["target"]
            told = [row["layer"], source, tokens[source], target, tokens[target]]
            assert ends == [str(one) for one in told]
            assert float(effect.replace("−", "-")) == pytest.approx(row["effect"], rel=0.01)
            assert float(true.replace("−", "-")) == pytest.approx(row["true"], rel=0.01)
    assert page.evaluate("document.querySelector('#edges-obstacle').hidden")
    assert page.errors == [] and page.dialogs == []


def test_a_report_says_why_there_is_no_estimate(page: Page, tmp_path: Path) -> None:
    model, ids, path = mamba_lm(), token_ids(1, 9), tmp_path / "edges.html"
    run = torch.no_grad()(lambda x: model(x).logits)
    report(run, ids, [ImplicitAttentionRollout], model=model, path=path)
    page.goto(path)
    assert "records no gradients" in page.text("#edges-obstacle")
    assert page.evaluate("document.querySelector('#edges table').hidden")
    report(model, ids, [LatimFlow], matrices=False, path=path)
    page.goto(path)
    assert page.evaluate("document.querySelector('#edges').hidden")
    assert page.errors == []


@pytest.mark.parametrize("width", [320, 1280])
def test_long_words_leave_the_page_as_wide_as_it_is(page: Page, tmp_path: Path, width: int) -> None:
    path = tmp_path / "edges.html"
    report(mamba_lm(), token_ids(1, 9), [LatimFlow], tokens=["long" * 40] * 9, path=path)
    page.resize(width)
    page.goto(path)
    assert page.overflow() <= 0


# --- in Insights ---------------------------------------------------------------------------------


@pytest.fixture
def opened(page: Page) -> Iterator[Any]:
    """Opens a visualizer's page, and in the end finds that all went well there."""
    served: list[AttributionVisualizer] = []

    def open_(visualizer: AttributionVisualizer) -> Page:
        served.append(visualizer)
        visualizer.serve()
        page.goto(visualizer.url)
        settled(page)
        return page

    yield open_
    for visualizer in served:
        visualizer.close()
    assert page.errors == [] and page.dialogs == []


def settled(page: Page) -> None:
    """Waits until the page has shown what it was asked for."""
    page.wait_for("!document.querySelector('main').hasAttribute('aria-busy')")
    page.wait_for("document.querySelector('article') !== null")


def prompts(*ids: list[int]) -> AttributionVisualizer:
    feature = TextFeature("prompt", None, None, lambda ids: [WORDS[i] for i in ids[0]])
    batches = [Batch(torch.tensor([row]), None) for row in ids]
    return AttributionVisualizer(mamba_lm(), WORDS, feature, batches, softmax)


def test_a_message_is_cut_and_the_true_prediction_shown(opened: Any) -> None:
    visualizer = prompts([1, 0, 3, 5], [2, 4, 6, 8])
    page = opened(visualizer)
    assert of_all(page, ".cutting summary") == ["Cut a message"] * 2
    page.click(".cutting summary")
    for place, value in enumerate([1, 3, 1]):  # from, to, layer
        choose(page, f".cutting label:nth-of-type({place + 1}) select", value)
    page.click(".cutting button")
    page.wait_for("document.querySelector('.result p') !== null")
    model, ids = visualizer.models[0], torch.tensor([[1, 0, 3, 5]])
    with torch.no_grad():
        before = model(ids).logits[0, -1].double()
        with knock_out(model, Edges(1, 1, 3)):
            without = model(ids).logits[0, -1].double()
    best = int(before.argmax())
    chances = [f"{float(x.softmax(-1)[best]):.3f}" for x in (before, without)]
    assert of_all(page, ".result tbody tr:first-child > *") == [WORDS[best], *chances]
    estimate = float(
        EdgeEffects(model, exact_norms=True).attribute(ids, (-1, best)).matrix(1)[0, 3, 1]
    )
    said = [float(number) for number in re.findall(r"-?\d+\.\d+", page.text(".result p"))]
    assert said == pytest.approx([float(before[best] - without[best]), estimate], abs=6e-4)
    # what cannot be cut is told in the place of what was shown of another edge
    choose(page, ".cutting label:nth-of-type(2) select", 0)
    page.click(".cutting button")
    page.wait_for("document.querySelector('.result .error') !== null")
    assert "every target comes before its source" in page.text(".result")
    assert page.count(".result table") == 0


def test_effects_are_on_the_class_that_is_explained(opened: Any) -> None:
    page = opened(prompts([7, 8, 9, 10]))
    page.click(".predicted button:nth-of-type(3)")
    settled(page)
    (chosen,) = of_all(page, '[aria-pressed="true"]')
    page.click(".cutting summary")
    page.click(".cutting button")
    page.wait_for("document.querySelector('.result p') !== null")
    (first,) = of_all(page, ".result tbody tr:first-child th")
    assert chosen.startswith(f"{first} (")


def test_only_texts_of_models_with_mixers_have_messages_to_cut(opened: Any) -> None:
    page = opened(table(Always(1), [numbers(1)]))
    assert page.count(".cutting") == 0
