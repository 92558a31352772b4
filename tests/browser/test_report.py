"""A report in a real browser, by mouse and by keyboard; roles there and in Insights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser.made import HOSTILE, METHODS, sentences
from helpers.browser import Page
from helpers.pages import read_page
from zoo.small import mamba_lm, token_ids

from captum_ssm import ImplicitAttentionRollout, LatimFlow, report


def token(index: int) -> str:
    return f'.token[data-index="{index}"]'


def expected(values: Sequence[float] | np.ndarray, end: float | None = None) -> np.ndarray:
    """The opacities that common.js gives to values: 64 steps up to 0.62."""
    end = np.abs(values).max() if end is None else end
    return np.round(np.abs(values) / end * 64) / 64 * 0.62


def shaded(method: dict) -> np.ndarray:
    """A method's values, without that of the asking token where it is the identity."""
    found = np.array([v or 0 for v in method["values"]])
    if method["own"] is not None:
        found[method["own"]] = 0
    return found


PAGE = "short"
WORDS = [f"w{i}" for i in range(17)]


def test_it_shows_what_the_file_holds(wide: Page, made: Path) -> None:
    example = read_page(made).facts["examples"][0]
    assert wide.text("#explained") == example["explained"]
    chips = wide.texts("#targets .name", "innerText")
    assert chips == [p["label"] for p in example["predictions"] if not p["rival"]]
    assert wide.count("#methods label") == 3
    assert wide.texts(".token") == WORDS
    np.testing.assert_allclose(
        wide.opacities(".token"), expected(np.array(example["methods"][0]["values"])), atol=0.006
    )
    assert not wide.is_hidden("#controls")
    wide.click("#numbers summary")
    wide.wait_for("document.querySelectorAll('#numbers-table tbody tr').length > 0")
    assert wide.count("#numbers-table tbody tr") == 17
    heads = wide.texts("#numbers-table th")
    assert heads == ["Position", "Token", *(m["name"] for m in example["methods"])]
    assert wide.text("#numbers-table tbody tr:nth-child(6)").startswith("5\tw5")


def bars(page: Page) -> list[bool]:
    """Which tokens have a bar below them."""
    return page.each(".token", "e.style.borderBottomColor !== ''")


def test_a_token_under_the_mouse_says_its_number_and_keeps_the_colours(
    wide: Page, made: Path
) -> None:
    page = read_page(made)
    example = page.facts["examples"][0]
    matrix, _ = page.matrix(example["maps"][0]["layers"][example["start"]])
    values = np.array(example["methods"][0]["values"])
    wide.hover(token(11))
    np.testing.assert_allclose(wide.opacities(".token"), expected(values), atol=0.006)
    assert bars(wide) == list(expected(matrix[11]) > 0)
    sign = "+" if values[11] > 0 else "−"
    said = re.match(r"Token 11 “w11”: ([+−][\d.e−]+) by LatimFlow", wide.text("#tip"))
    assert said is not None and said[1][0] == sign
    assert float(said[1][1:].replace("−", "-")) == pytest.approx(abs(values[11]), rel=6e-3)
    best = int(np.abs(matrix[11]).argmax())
    assert f"receives most from “w{best}”" in wide.text("#status")
    assert "Token 11 “w11”" in wide.text("#partners-title")
    assert wide.text("#sources tbody tr td:nth-child(2)") == f"w{best}"
    taker = int(np.abs(matrix[:, 11]).argmax())
    assert wide.text("#takers tbody tr td:nth-child(2)") == f"w{taker}"
    wide.leave()
    assert wide.is_hidden("#tip")
    assert not any(bars(wide))


def test_methods_maps_layers_and_examples_switch(wide: Page, made: Path) -> None:
    page = read_page(made)
    examples = page.facts["examples"]
    wide.click("#methods label:nth-of-type(3)")
    wide.leave()
    values = shaded(examples[0]["methods"][2])
    np.testing.assert_allclose(wide.opacities(".token"), expected(values), atol=0.006)
    assert "ImplicitAttentionRollout" in wide.text("#shown")
    assert "Not colored: the query token 16," in wide.text("#shown")
    wide.click(token(16))
    wide.choose("#map", 1)
    wide.click("#thumbnails label:last-of-type")
    assert wide.text("#layer-name").startswith("Layer 2 of 0–2: Mamba")
    matrix, _ = page.matrix(examples[0]["maps"][1]["layers"][2])
    assert bars(wide) == list(expected(matrix[16]) > 0)
    best = int(np.abs(matrix[16]).argmax())
    assert wide.text("#sources tbody tr td:nth-child(2)") == f"w{best}"
    wide.focus("#example")
    wide.keys("ArrowDown")
    assert wide.text(token(3)) == "v3"
    values = shaded(examples[1]["methods"][2])
    np.testing.assert_allclose(wide.opacities(".token"), expected(values), atol=0.006)


def test_the_text_is_shown_before_maps_are_unpacked(page: Page, made: Path) -> None:
    page.at_start(
        "globalThis.unpacked = 0; const Plain = DecompressionStream;"
        "globalThis.DecompressionStream = function (kind) {"
        "  unpacked += 1; return new Plain(kind); };"
        "new MutationObserver(() => {"
        "  if (document.querySelector('#text .token')) globalThis.first ??= unpacked;"
        "}).observe(document, { childList: true, subtree: true });"
    )
    page.goto(made)
    maps = page.count("script[id^='map-']")
    others = page.count("script[type='application/octet-stream']") - maps
    assert maps == 12 and page.evaluate("unpacked") == maps + others
    assert others <= page.evaluate("first") <= others + 1
    assert page.count("#thumbnails canvas") == 3 and page.errors == []


def test_small_maps_open_each_layer(opened: Page) -> None:
    """By a click and by keys; each small map is painted like the large one."""
    opened.scroll_to("#thumbnails")
    opened.wait_for("document.querySelector('#thumbnails canvas').width === 17")
    small = opened.each("#thumbnails canvas", "e.toDataURL()")
    large = "document.querySelector('#overview canvas').toDataURL()"
    assert len(set(small)) == 3
    opened.click("#thumbnails label:last-of-type")
    assert (
        opened.text("#layer-name").startswith("Layer 2 of 0–2")
        and opened.evaluate(large) == small[2]
    )
    for layer in (1, 0):
        opened.keys("ArrowLeft")
        assert opened.text("#layer-name").startswith(f"Layer {layer} of 0–2")
        assert opened.evaluate(large) == small[layer]
    opened.focus(token(3))
    opened.keys("PageUp")
    assert opened.each("#thumbnails input", "e.checked") == [False, True, False]
    opened.click("#theme")
    opened.scroll_to("#thumbnails")
    opened.wait_for(f"document.querySelectorAll('#thumbnails canvas')[1].toDataURL() === {large}")


def test_pointing_at_the_picture_of_a_map(wide: Page) -> None:
    wide.hover("#overview canvas")
    assert "Token 8 " in wide.text("#status")
    assert re.match(r"Layer \d: token 8 “w8” receives .* from token 8 “w8”", wide.text("#tip"))
    wide.click("#overview canvas")
    wide.leave()
    assert "Token 8 “w8” (selected)" in wide.text("#status")


def test_hostile_text_is_text_everywhere(page: Page, tmp_path: Path) -> None:
    hostile, ids = "\n".join(HOSTILE), token_ids(2, len(HOSTILE))
    given = {"tokens": [HOSTILE, HOSTILE[::-1]], "labels": HOSTILE * 2, "title": hostile}
    given["names"] = [hostile, "</option><script>alert(1)</script>"]
    path = report(mamba_lm(), ids, METHODS, **given, path=tmp_path / "hostile <b> & 'page'.html")
    page.goto(path)
    assert page.evaluate("document.title").split() == hostile.split()
    spelled = [*HOSTILE[:3], r"\u200b", "שלום", "👩\\u200d🚀", r"a\nb", *HOSTILE[7:9], "∅"]
    assert page.texts(".token", "innerText") == spelled
    for index in range(len(HOSTILE)):
        page.click(token(index))
    page.click("#numbers summary")
    page.wait_for("document.querySelectorAll('#numbers-table tbody tr').length > 0")
    page.focus("#example")
    page.keys("ArrowDown")
    page.hover(token(5))
    assert page.count("img") == page.count("main script") == 0
    assert page.dialogs == [] and page.errors == []
    assert page.requests == [path.as_uri()]


def test_the_policy_stops_what_is_not_the_pages_own(page: Page, made: Path) -> None:
    """What other tests rely on: a foreign script or request would be refused, and seen."""
    page.goto(made)
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'alert(1)';"
        " document.body.append(s); const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; })()"
    )
    page.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert len(page.errors) == 2
    assert all("Content Security Policy" in error for error in page.errors)
    assert page.dialogs == []


@pytest.fixture
def told(page: Page, tmp_path: Path) -> Iterator[tuple[Page, dict]]:
    """A report in the browser, and what it holds of a method that tells roles."""
    torch.manual_seed(3)
    path, methods = tmp_path / "roles.html", [ImplicitAttentionRollout, LatimFlow]
    options = {LatimFlow.get_name(): {"rule": "centered"}}
    report(mamba_lm(), token_ids(1, 17), methods, tokens=WORDS, options=options, path=path)
    page.goto(path)
    yield page, read_page(path).facts["examples"][0]["methods"][1]
    assert page.errors == []


def test_a_report_has_a_row_for_each_role_on_one_scale(told: tuple[Page, dict]) -> None:
    page, cause = told
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


def test_a_report_says_what_a_token_did(told: tuple[Page, dict]) -> None:
    page, cause = told
    page.click("#methods [value='1']")
    for width in (320, 390, 960, 2000):  # and moves no token
        page.resize(width)
        assert page.overflow() <= 0
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
    chosen = {"attribution_arguments": {"rule": "centered", "baselines": "0"}}
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
