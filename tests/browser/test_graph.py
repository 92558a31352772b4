"""The graph of a report in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.chromium import Page
from helpers.pages import read_page
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow, report

pytestmark = pytest.mark.browser

HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "שלום", "", "<!--"]
WORDS = [*HOSTILE, *(f"w{i}" for i in range(60))]


def of_all(page: Page, selector: str, what: str) -> list:
    """What there is of every element ``e`` that is selected."""
    return list(page.evaluate(f"[...document.querySelectorAll('{selector}')].map((e) => {what})"))


def choose(page: Page, number: int) -> None:
    """Chooses an example as the list's own popup would."""
    page.evaluate(
        f"""(() => {{
          const list = document.querySelector('#example');
          list.value = {number};
          list.dispatchEvent(new Event('change', {{bubbles: true}}));
        }})()"""
    )


def test_a_dot_for_each_node_and_a_line_for_each_link(page: Page, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path, ids = tmp_path / "graph.html", token_ids(2, 9)
    report(mamba_lm(), ids, [LatimFlow], tokens=[WORDS[:9], WORDS[4:13]], graph=6, path=path)
    page.goto(path)
    for number, example in enumerate(read_page(path).facts["examples"]):
        choose(page, number)
        tokens, graph = example["tokens"], example["graph"]
        assert page.count("#graph circle") == len(graph["nodes"]) > 6
        assert page.count("#graph line") == len(graph["links"]) > 6
        hollow = sum(node["kind"] == "error" for node in graph["nodes"])
        assert page.count("#graph circle.hollow") == hollow
        takes = sum(link["weight"] < 0 for link in graph["links"])
        assert page.count("#graph line.takes") == takes
        # nodes of a token stand above each other, those of a row beside each other
        across, down = (of_all(page, "#graph circle", f"e.c{axis}.baseVal.value") for axis in "xy")
        nodes = graph["nodes"]
        assert len({(node["position"], x) for node, x in zip(nodes, across, strict=True)}) == len(
            {node["position"] for node in nodes}
        )
        heights = {node["row"]: y for node, y in zip(nodes, down, strict=True)}
        assert sorted(heights, key=heights.__getitem__) == sorted(heights, reverse=True)
        assert len(set(zip(across, down, strict=True))) == len(nodes)
        # every line runs from a dot to a dot
        dots = set(zip(across, down, strict=True))
        for end in "12":
            ends = [of_all(page, "#graph line", f"e.{axis}{end}.baseVal.value") for axis in "xy"]
            assert set(zip(*ends, strict=True)) <= dots
        (label,) = of_all(page, "#graph svg[role=img]", "e.ariaLabel")
        assert f"on the way to {example['explained']}" in label
        cells = of_all(page, "#graph tbody td", "e.textContent")
        assert len(cells) == 4 * len(graph["path"])
        for place, step in enumerate(graph["path"]):
            what, position, word, adds = cells[4 * place : 4 * place + 4]
            node = nodes[step["node"]]
            assert what == (graph["rows"][node["row"] - 1] if node["row"] else "the word itself")
            assert [position, word] == [str(node["position"]), tokens[node["position"]]]
            assert float(adds.replace("−", "-")) == pytest.approx(step["adds"], rel=0.01)
    assert page.errors == [] and page.dialogs == []


def test_words_of_a_long_text_that_have_no_nodes_are_left_out(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "graph.html"
    words = [f"word{i}" for i in range(300)]
    report(mamba_lm(), token_ids(1, 300), [LatimFlow], tokens=words, graph=4, path=path)
    (example,) = read_page(path).facts["examples"]
    page.goto(path)
    written = of_all(page, "#graph svg text:not(.row)", "e.textContent")
    shown = {int(word.removeprefix("word")) for word in written if word != "⋮"}
    assert shown >= {node["position"] for node in example["graph"]["nodes"]}
    assert len(shown) <= 40
    assert "⋮" in written
    for width in (320, 1280):
        page.resize(width)
        assert page.overflow() <= 0
    assert page.errors == []


def test_a_page_without_a_graph_says_why_or_nothing(page: Page, tmp_path: Path) -> None:
    model, ids, path = mamba_lm(), token_ids(1, 9), tmp_path / "graph.html"
    report(model, ids, [LatimFlow], matrices=False, path=path)
    page.goto(path)
    assert page.evaluate("document.querySelector('#graph').hidden")
    model.backbone.layers[1] = model.backbone.layers[0]
    report(model, ids, [LatimFlow], matrices=False, graph=3, path=path)
    page.goto(path)
    assert "runs several times" in page.text("#graph .obstacle")
    assert page.evaluate("document.querySelector('#graph .drawn').hidden")
    assert page.errors == []
