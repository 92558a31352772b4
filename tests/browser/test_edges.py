"""Edges in a report and in Insights, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.made import sentences
from helpers.browser import Page
from helpers.insights_examples import Always, numbers, table
from helpers.pages import read_page
from zoo.small import VOCABULARY, mamba_lm, token_ids

from captum_ssm import EdgeEffects, Edges, ImplicitAttentionRollout, LatimFlow, knock_out, report

HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "שלום", "", "<!--"]
WORDS = [*HOSTILE, *(f"w{i}" for i in range(VOCABULARY - len(HOSTILE)))]


def test_a_report_lists_the_strongest(page: Page, tmp_path: Path) -> None:
    path, ids = tmp_path / "edges.html", token_ids(2, 9)
    report(mamba_lm(), ids, [LatimFlow], tokens=[WORDS[:9], WORDS[4:13]], edges=4, path=path)
    page.goto(path)
    assert page.texts("#edges thead th")[-2:] == ["Estimated effect of cutting", "True effect"]
    for number, example in enumerate(read_page(path).facts["examples"]):
        page.choose("#example", number)
        cells = page.texts("#edges tbody td")
        tokens, rows = example["tokens"], example["edges"]["rows"]
        assert len(rows) == 4
        for place, row in enumerate(rows):
            *ends, effect, true = cells[7 * place : 7 * place + 7]
            source, target = row["source"], row["target"]
            told = [row["layer"], source, tokens[source], target, tokens[target]]
            assert ends == [str(one) for one in told]
            assert float(effect.replace("−", "-")) == pytest.approx(row["effect"], rel=0.01)
            assert float(true.replace("−", "-")) == pytest.approx(row["true"], rel=0.01)
    assert page.is_hidden("#edges-obstacle")
    assert page.errors == [] and page.dialogs == []


def test_a_report_says_why_there_is_no_estimate(page: Page, tmp_path: Path) -> None:
    model, ids, path = mamba_lm(), token_ids(1, 9), tmp_path / "edges.html"
    run = torch.no_grad()(lambda x: model(x).logits)
    report(run, ids, [ImplicitAttentionRollout], model=model, path=path)
    page.goto(path)
    assert "records no gradients" in page.text("#edges-obstacle")
    assert page.is_hidden("#edges table")
    report(model, ids, [LatimFlow], matrices=False, path=path)
    page.goto(path)
    assert page.is_hidden("#edges")
    assert page.errors == []


def test_a_message_is_cut_and_the_true_prediction_shown(shown: Any) -> None:
    visualizer = sentences([[1, 0, 3, 5], [2, 4, 6, 8]], WORDS)
    page = shown(visualizer)
    assert page.texts(".cutting summary") == ["Cut a message"] * 2
    page.click(".cutting summary")
    for place, value in enumerate([1, 3, 1]):  # from, to, layer
        page.choose(f".cutting label:nth-of-type({place + 1}) select", value)
    page.click(".cutting button")
    page.wait_for("document.querySelector('.result p') !== null")
    model, ids = visualizer.models[0], torch.tensor([[1, 0, 3, 5]])
    with torch.no_grad():
        before = model(ids).logits[0, -1].double()
        with knock_out(model, Edges(1, 1, 3)):
            without = model(ids).logits[0, -1].double()
    best = int(before.argmax())
    chances = [f"{float(x.softmax(-1)[best]):.3f}" for x in (before, without)]
    assert page.texts(".result tbody tr:first-child > *") == [WORDS[best], *chances]
    estimate = float(
        EdgeEffects(model, exact_norms=True).attribute(ids, (-1, best)).matrix(1)[0, 3, 1]
    )
    said = [float(number) for number in re.findall(r"-?\d+\.\d+", page.text(".result p"))]
    assert said == pytest.approx([float(before[best] - without[best]), estimate], abs=6e-4)
    # what cannot be cut is told in the place of what was shown of another edge
    page.choose(".cutting label:nth-of-type(2) select", 0)
    page.click(".cutting button")
    page.wait_for("document.querySelector('.result .error') !== null")
    assert "every target comes before its source" in page.text(".result")
    assert page.count(".result table") == 0


def test_only_texts_of_models_with_mixers_have_messages_to_cut(shown: Any) -> None:
    page = shown(table(Always(1), [numbers(1)]))
    assert page.count(".cutting") == 0
