"""Roles of tokens in a report and in Insights, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser.made import sentences
from helpers.browser import Page
from helpers.pages import read_page
from zoo.small import mamba_lm, token_ids

from captum_ssm import ImplicitAttentionRollout, LatimFlow, report

WORDS = [f"w{i}" for i in range(17)]


@pytest.fixture
def opened(page: Page, tmp_path: Path) -> Iterator[tuple[Page, dict]]:
    """A report in the browser, and what it holds of a method that tells roles."""
    torch.manual_seed(3)
    path, methods = tmp_path / "roles.html", [ImplicitAttentionRollout, LatimFlow]
    options = {LatimFlow.get_name(): {"rule": "centred"}}
    report(mamba_lm(), token_ids(1, 17), methods, tokens=WORDS, options=options, path=path)
    page.goto(path)
    yield page, read_page(path).facts["examples"][0]["methods"][1]
    assert page.errors == []


def expected(values: Sequence[float], end: float) -> np.ndarray:
    """The opacities that common.js gives to values: 64 steps up to 0.62."""
    return np.round(np.abs(values) / end * 64) / 64 * 0.62


def test_a_report_has_a_row_for_each_role_on_one_scale(opened: tuple[Page, dict]) -> None:
    page, cause = opened
    assert page.texts("#methods .role .name") == list(cause["roles"])
    assert len(cause["roles"]) == 5
    end = max(np.abs(values).max() for values in cause["roles"].values())
    largest = page.texts("#methods .role .largest")
    for index, (role, values) in enumerate(cause["roles"].items()):
        assert largest[index].startswith(f"w{int(np.abs(values).argmax())} ")
        page.click(f"#methods [value='{2 + index}']")
        np.testing.assert_allclose(page.opacities(".token"), expected(values, end), atol=0.006)
        said = f"Background: relevance by LatimFlow, as {role}."
        assert page.text("#shown").startswith(said)


def test_a_report_says_what_a_token_did(opened: tuple[Page, dict]) -> None:
    page, cause = opened
    page.click("#methods [value='1']")
    for width in (390, 960):  # and moves no token
        page.resize(width)
        tops = "e.getBoundingClientRect().top + scrollY"
        before = page.each(".token", tops)
        for index in (3, 16, 11):
            page.hover(f'.token[data-index="{index}"]')
            page.wait_for(f"document.querySelector('#status').innerText.includes('Token {index} ')")
            assert page.each(".token", tops) == pytest.approx(before, abs=0.5)
    sizes = {role: abs(values[11]) for role, values in cause["roles"].items()}
    largest = max(sizes, key=sizes.__getitem__)
    assert f"by LatimFlow ({largest} " in page.text("#status")
    page.click("#numbers summary")
    page.wait_for("document.querySelectorAll('#numbers-table tbody tr').length > 0")
    heads = page.texts("#numbers th")
    assert heads[4:] == [f"LatimFlow, as {role}" for role in cause["roles"]]


def test_insights_colours_words_by_role_on_one_scale(shown: Any) -> None:
    chosen = {"attribution_arguments": {"rule": "centred", "baselines": "0"}}
    visualizer = sentences([[1, 2, 3, 4]], **chosen)
    ((output,),) = visualizer.visualize()
    page = shown(visualizer)
    assert page.each("#argument-baselines option", "e.text") == ["default", "mean", "0"]
    assert page.evaluate("document.querySelector('#argument-baselines').value") == "0"
    assert page.texts(".role h5") == list(output.roles)
    assert page.texts(".role .token") == ["w1", "w2", "w3", "w4"] * len(output.roles)
    percents = [percent for values in output.roles.values() for percent in values]
    assert max(map(abs, percents)) == pytest.approx(100)
    wanted = expected(percents, 100)
    np.testing.assert_allclose(page.opacities(".role .token"), wanted, atol=0.011)
