"""Edges and the graph in a report and in Insights, in a real browser."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser.made import HOSTILE, number, sentences
from helpers.browser import Page
from helpers.pages import read_page
from zoo.small import VOCABULARY, mamba_lm, token_ids

from captum_ssm import EdgeEffects, Edges, LatimFlow, report
from captum_ssm.explain.knockout import cut_edges

MANY = [*HOSTILE[:2], "שלום", "", "<!--", *(f"w{i}" for i in range(60))]
WORDS = MANY[:VOCABULARY]


def test_a_message_is_cut_and_the_true_prediction_shown(shown: Any) -> None:
    visualizer, ids = sentences([[1, 0, 3, 5], [2, 4, 6, 8]], WORDS), torch.tensor([[1, 0, 3, 5]])
    page, model = shown(visualizer), visualizer.models[0]
    assert page.texts(".cutting summary") == ["Cut messages"] * 2
    page.click(".cutting summary")
    for place, value in enumerate([1, 3, 1]):  # from, to, layer
        page.choose(f".cutting label:nth-of-type({place + 1}) select", value)
    page.click(".cutting form button")
    page.wait_for("document.querySelector('.result p') !== null")
    best, label = int(model(ids).logits[0, -1].argmax()), lambda index, output: WORDS[index]
    cut = cut_edges(EdgeEffects(model), ids, (-1, best), Edges(1, 1, 3), label)
    chances = [f"{x:.3f}" for x in (cut.answers[0].before, cut.answers[0].without)]
    assert page.texts(".result tbody tr:first-child > *") == [WORDS[best], *chances, ""]
    pressed = page.texts(".cutting [aria-pressed=true]")
    # with its estimate, if the list came first
    assert len(pressed) == 1 and re.search(r"3, layer 1( \(.*\))?$", pressed[0])
    page.click(".cutting [aria-pressed=true]")  # restores it
    page.wait_for("document.querySelector('.result p') === null")
    # what cannot be cut is told in the place of what was shown of another edge
    page.choose(".cutting label:nth-of-type(2) select", 0)
    page.click(".cutting form button")
    page.wait_for("document.querySelector('.result .error') !== null")
    assert "every target comes before its source" in page.text(".result")
    assert page.count(".result table") == 0


@pytest.mark.parametrize("rough", [False, True])
def test_estimates_of_first_order_are_marked(shown: Any, rough: bool, monkeypatch: Any) -> None:
    effects = functools.partial(EdgeEffects, exact_norms=not rough)
    monkeypatch.setattr("captum_ssm.insights.calculation.EdgeEffects", effects)
    page = shown(sentences([[1, 0, 3, 5]], WORDS))
    page.click(".cutting summary")
    page.wait_for("document.querySelector('.cutting [aria-pressed]') !== null")
    assert all(("(≈ " in text) == rough for text in page.texts(".cutting [aria-pressed]"))


def test_a_dot_for_each_node_and_a_line_for_each_link(page: Page, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path, names = tmp_path / "graph.html", [MANY[:9], MANY[4:13]]
    given: dict[str, Any] = {"tokens": names, "graph": 6, "cuts": 0}
    report(mamba_lm(), token_ids(2, 9), [LatimFlow], **given, path=path)
    page.goto(path)
    for number_, example in enumerate(read_page(path).facts["examples"]):
        page.choose("#example", number_)
        tokens, graph = example["tokens"], example["graph"]
        nodes, links = graph["nodes"], graph["links"]
        assert page.count(".graph .dot") == len(nodes) > 6
        assert page.count(".graph line") == len(links) > 6
        assert page.count(".graph .hollow") == sum(node["kind"] == "error" for node in nodes)
        assert page.count(".graph line.takes") == sum(link["weight"] < 0 for link in links)
        # nodes of a token stand above each other, those of a row beside each other
        across, down = (page.each(".graph .hit", f"e.c{axis}.baseVal.value") for axis in "xy")
        columns = {(node["position"], x) for node, x in zip(nodes, across, strict=True)}
        assert len(columns) == len({node["position"] for node in nodes})
        heights = {node["row"]: y for node, y in zip(nodes, down, strict=True)}
        assert sorted(heights, key=heights.__getitem__) == sorted(heights, reverse=True)
        dots = set(zip(across, down, strict=True))
        assert len(dots) == len(nodes)
        for end in "12":  # every line runs from a dot to a dot
            ends = [page.each(".graph line", f"e.{axis}{end}.baseVal.value") for axis in "xy"]
            assert set(zip(*ends, strict=True)) <= dots
        (label,) = page.each(".graph svg[role=group]", "e.ariaLabel")
        assert f"Attribution graph of {example['explained']}" in label
        cells = page.texts(".graph .strongest tbody td")
        assert len(cells) == 4 * len(graph["path"])
        for place, step in enumerate(graph["path"]):
            what, position, word, adds = cells[4 * place : 4 * place + 4]
            node = nodes[step["node"]]
            assert what == (graph["rows"][node["row"] - 1] if node["row"] else "input token")
            assert [position, word] == [str(node["position"]), tokens[node["position"]]]
            assert number(adds) == pytest.approx(step["adds"], rel=0.01)
    assert page.errors == [] and page.dialogs == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of which every activation is followed."""
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("graph") / "report.html"
    words = [f"w{i}" for i in range(7)]
    return report(mamba_lm(), token_ids(1, 7), [LatimFlow], tokens=words, graph=99, path=path)


def check_parts(page: Page, made: Path, chosen: int) -> None:
    """The table holds the parts of a node, the strongest first, and they add up to it."""
    (example,) = read_page(made).facts["examples"]
    graph = example["graph"]
    names = page.texts(".graph .parts td:first-child")
    values = [number(x) for x in page.texts(".graph .parts td:last-child")]
    assert names[-2:] == ["Biases", "Sum"]
    assert values[-1] == pytest.approx(graph["nodes"][chosen]["value"], rel=6e-3)
    size = sum(map(abs, values[:-1]))
    assert sum(values[:-1]) == pytest.approx(values[-1], abs=6e-3 * size)
    entering = [link["weight"] for link in graph["links"] if link["target"] == chosen]
    assert values[0] == pytest.approx(max(entering, key=abs), rel=6e-3)


def lit(page: Page) -> int:
    """How many lines stand out."""
    return page.count(".graph line:not(.faint, .hidden)")


def test_a_click_on_a_dot_isolates_what_it_is_made_of(opened: Page, made: Path) -> None:
    (example,) = read_page(made).facts["examples"]
    nodes, links = example["graph"]["nodes"], example["graph"]["links"]
    check_parts(opened, made, len(nodes) - 1)
    chosen = next(i for i, node in enumerate(nodes) if node["row"] == 2)
    said = f"backbone.layers.1 at token {nodes[chosen]['position']} “w"
    opened.click(f".graph .dot[aria-label^='{said}']")
    assert lit(opened) == sum(link["target"] == chosen for link in links)
    check_parts(opened, made, chosen)
    assert opened.count(".graph .dot[aria-pressed='true']") == 1
    # on to a part, by the table
    opened.click(".graph .parts button")
    strongest = max((x for x in links if x["target"] == chosen), key=lambda x: abs(x["weight"]))
    check_parts(opened, made, strongest["source"])
    opened.click(".graph .whole")
    assert opened.is_hidden(".graph .whole")
    assert opened.count(".graph .faint") == 0


def test_a_slider_leaves_out_thin_lines(opened: Page, made: Path) -> None:
    (example,) = read_page(made).facts["examples"]
    sizes = sorted((abs(link["weight"]) for link in example["graph"]["links"]), reverse=True)
    assert lit(opened) <= 60 < len(sizes)  # to begin with
    opened.focus(".graph input")
    opened.keys("Home")
    assert lit(opened) == len(sizes)
    opened.keys("End")
    assert lit(opened) == 1
    assert opened.text(".graph output").startswith(f"{sizes[0]:.3g} (")
    # the widest last, on top, and as wide as it is relevant
    widths = opened.each(".graph line", "Number(e.getAttribute('stroke-width'))")
    shares = (np.array(widths) - widths[0]) / (widths[-1] - widths[0])
    expected = np.array(sizes[::-1])
    expected = (expected - expected[0]) / (expected[-1] - expected[0])
    np.testing.assert_allclose(shares, expected, atol=1e-4)
