"""Arcs of edges, curves of windows and graphs over words: where they are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import AWKWARD, draw
from zoo.small import mamba_lm, token_ids

from captum_ssm import EdgeEffects, attribution_graph
from captum_ssm.edges import Edge, KnockoutWindows
from captum_ssm.errors import InputError, OptionError
from captum_ssm.inside import Graph, Node
from captum_ssm.models import load_bundled
from captum_ssm.viz import plot_edges, plot_graph, plot_windows

WORDS = ["anna", "owns", "the", "lamp", "."]


def edge(source: int, target: int, effect: float, layer: int = 0) -> Edge:
    return Edge(layer, f"layers.{layer}", target, source, effect)


def arcs(axis: Any) -> list[tuple[float, float]]:
    """Where each arc begins and ends."""
    ends = [arc.get_path().vertices[[0, -1], 0].tolist() for arc in axis.patches]
    return [(begins, stops) for begins, stops in ends]


def places(axis: Any) -> dict[int, float]:
    return dict(enumerate(axis.get_xticks()))


def test_an_arc_goes_from_its_source_to_its_target_and_shows_size_and_sign() -> None:
    edges = [edge(3, 4, -1.0), edge(0, 2, 4.0), edge(1, 1, 0.5)]
    figure, (axis,) = plot_edges(WORDS, edges, title="$t$")
    draw(figure)
    words, (weak, against, strong) = places(axis), axis.patches
    nearest = [
        tuple(min(words, key=lambda w: abs(words[w] - x)) for x in ends) for ends in arcs(axis)
    ]
    assert nearest == [(1, 1), (3, 4), (0, 2)]  # the strongest last, above the others
    assert weak.get_linewidth() < against.get_linewidth() < strong.get_linewidth()
    assert weak.get_edgecolor()[:3] == strong.get_edgecolor()[:3] != against.get_edgecolor()[:3]
    assert [text.get_text() for text in axis.texts] == ["+4", "−1"]
    heads = [float(line.get_xdata()[0]) for line in axis.lines]
    np.testing.assert_allclose(heads, [stop for _, stop in arcs(axis)])
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said == ["increases the output", "decreases the output"]


def test_a_row_for_each_layer() -> None:
    edges = [edge(0, 1, 1.0, layer=3), edge(1, 2, 8.0, layer=3), edge(0, 4, -2.0, layer=7)]
    figure, (first, second) = plot_edges(WORDS, edges, by_layer=True)
    draw(figure)
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["layer 3", "layer 7"]
    assert (len(first.patches), len(second.patches)) == (2, 1)
    # one scale for all rows
    assert first.patches[0].get_linewidth() < second.patches[0].get_linewidth()
    _, (alone,) = plot_edges(WORDS, edges)
    assert [text.get_text() for text in alone.texts] == ["layer 3: +8", "layer 7: −2"]


@pytest.mark.slow
def test_of_a_long_text_words_far_from_edges_are_left_out() -> None:
    tokens = [f"w{i}" for i in range(300)]
    figure, (axis,) = plot_edges(tokens, [edge(20, 250, 1.0), edge(100, 250, -1.0)])
    draw(figure)
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert {"w20", "w100", "w250", "w19", "w251", "⋮"} <= set(labels)
    assert "w60" not in labels and len(labels) < 60
    numbers = [int(label[1:]) for label in labels if label != "⋮"]
    assert numbers == sorted(numbers)
    at = dict(zip(labels, axis.get_xticks(), strict=True))
    for begins, stops in arcs(axis):
        assert min(abs(begins - at["w20"]), abs(begins - at["w100"])) < 1
        assert abs(stops - at["w250"]) < 1


@pytest.mark.slow
def test_effects_of_first_order_are_marked() -> None:
    effects = EdgeEffects(mamba_lm(), rule="frozen").attribute(token_ids(1, 4), (-1, 3))
    _, axes = plot_edges(["a", "b", "c", "d"], effects.top(2)[0])
    numbers = [text.get_text() for axis in axes for text in axis.texts]
    assert numbers and all("≈" in text for text in numbers)


def test_awkward_tokens_and_refusals() -> None:
    draw(plot_edges(AWKWARD, [edge(0, len(AWKWARD) - 1, 0.0)])[0])
    with pytest.raises(InputError, match="edges is empty"):
        plot_edges(WORDS, [])
    for ends in ((5, 1), (1, -1)):
        with pytest.raises(InputError, match=r"edges has an end at token (5|-1), but tokens has 5"):
            plot_edges(WORDS, [edge(*ends, 1.0)])
    with pytest.raises(InputError, match="NaN"):
        plot_edges(WORDS, [edge(0, 1, float("nan"))])


def windows(size: int = 3, **changed: Any) -> KnockoutWindows:
    plain, without = torch.tensor([0.5, 0.25]), torch.rand(2, 4, 2)
    given = {"plain": plain, "probabilities": without, **changed}
    return KnockoutWindows(("$subject", "last"), ("a", "b", "c", "d"), size, **given)


def test_a_curve_for_each_kind() -> None:
    found = windows()
    figure, axis = plot_windows(found, title="$Mamba")
    draw(figure)
    zero, *curves = axis.lines
    assert set(zero.get_ydata()) == {0}
    percent = 100 * (found.probabilities - found.plain) / found.plain
    for line, change in zip(curves, percent, strict=True):
        assert list(line.get_xdata()) == [0, 1, 2, 3]
        np.testing.assert_allclose(line.get_ydata(), change.mean(-1), rtol=1e-4)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [r"\$subject", "last"]
    said = axis.get_title(loc="left")
    assert said == r"\$Mamba – probability of the answer: 0.38 (mean of 2 examples)"
    assert axis.get_xlabel() == "middle layer of a window of 3 layers"
    assert len(axis.collections) == 2
    # one example has no band, and one layer is no window
    found = windows(1, plain=torch.tensor([0.5]), probabilities=torch.rand(2, 4, 1))
    figure, axis = plot_windows(found)
    draw(figure)
    assert not axis.collections and axis.get_xlabel() == "layer"
    with pytest.raises(InputError, match="NaN"):
        plot_windows(windows(plain=torch.zeros(2), probabilities=torch.zeros(2, 4, 2)))


FOUR = ("anna", "owns", "the", "lamp")


def graph(words: tuple[str, ...] = FOUR, **changes: Any) -> Graph:
    """Two features of two tokens, an error, and the target at the last token."""
    last = len(words) - 1
    nodes = [Node("token", "", 0, i, i, 0.0, 0.1 * (i + 1), word) for i, word in enumerate(words)]
    nodes += [
        Node("feature", "backbone.layers.0", 1, last, 7, 2.0, 0.6, "a thing"),
        Node("feature", "backbone.layers.0", 1, 0, 3, 1.0, 0.3, "a name"),
        Node("error", "backbone.layers.0", 1, last, None, 0.5, 0.1, "error"),
        Node("constants", "", 0, None, None, 0.0, 0.0, "constants"),
        Node("target", "", 2, last, 9, 3.0, 0.0, "kite"),
    ]
    edges = torch.zeros(len(nodes), len(nodes))
    thing, name, error, constants, target = range(len(words), len(nodes))
    edges[thing, last], edges[name, 0] = 2.0, 1.0
    edges[target, thing], edges[target, name], edges[target, error] = 2.0, -1.0, 0.5
    edges[target, constants], edges[target, 1] = 1.5, 0.05
    return Graph(tuple(nodes), changes.get("edges", edges), words, {})


def dots(axis: Any) -> list[tuple[float, float]]:
    return [tuple(c.get_offsets()[0].tolist()) for c in axis.collections]


def test_nodes_stand_over_their_words_in_rows_of_layers():
    figure, axis = plot_graph(graph(), title="$t$")
    draw(figure)
    columns = axis.get_xticks()
    rows = [label.get_text() for label in axis.get_yticklabels()]
    assert rows == ["tokens", "layers.0", "target"]
    places = dots(axis)  # four tokens, two features, the error, the target: no constants
    assert len(places) == 8
    assert [y for _, y in places[:4]] == [0] * 4
    assert [x for x, _ in places[:4]] == pytest.approx(list(columns))
    (thing, name, error), target = places[4:7], places[7]
    assert name == pytest.approx((columns[0], 1)) and target == pytest.approx((columns[3], 2))
    assert thing[1] > 1 > error[1]  # the one of more influence above
    assert abs(thing[0] - columns[3]) < abs(thing[0] - columns[2])
    assert {"a thing", "a name", "kite"} <= {text.get_text() for text in axis.texts}
    _, axis = plot_graph(graph(), most=1)  # the least influential are left out
    assert len(dots(axis)) == 3  # a token, a feature, the target
    assert {text.get_text() for text in axis.texts} == {"a thing", "kite"}


def test_edges_are_as_wide_as_what_they_carry_and_coloured_by_sign():
    figure, axis = plot_graph(graph())
    draw(figure)
    places = dots(axis)

    def line(source: int, target: int) -> Any:
        ends = [places[source], places[target]]
        found = [x for x in axis.lines if np.allclose(x.get_xydata(), ends)]
        return found[0] if found else None

    thing, name, error, owns = (line(i, 7) for i in (4, 5, 6, 1))
    assert owns is None  # a hundredth of what enters
    assert thing.get_linewidth() > name.get_linewidth() > error.get_linewidth()
    assert thing.get_color() == error.get_color() != name.get_color()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["adds", "subtracts"]


@pytest.mark.slow
def test_lines_of_a_flow_are_as_wide_as_exact_parts() -> None:
    """What whole activations of a small trained model pass on, all of them."""
    model, vocabulary = load_bundled("recall-mamba")
    words = ["anna", "owns", "the", "lamp", ".", "?", "anna", "owns", "the"]
    ids, target = torch.tensor([vocabulary.encode(" ".join(words))]), vocabulary.encode("lamp")[0]
    blocks = ["backbone.layers.0", "backbone.layers.1"]
    asked: dict[str, Any] = {"nodes": blocks, "keep": None, "tokens": words}
    found = attribution_graph(model.double(), ids, (-1, target), **asked)
    figure, axis = plot_graph(found, most=99, by="relevance")
    draw(figure)
    # constants are not drawn, nor lines of less than three hundredths of the widest
    sizes = found.edges[:, :-2].abs().flatten()
    wanted = sorted(x for x in (sizes / sizes.max()).tolist() if x > 0.03)
    widths = sorted((line.get_linewidth() - 0.6) / 4.5 for line in axis.lines)
    assert widths == pytest.approx(wanted, abs=1e-9)


@pytest.mark.slow
def test_long_and_awkward_texts_and_refusals():
    draw(plot_graph(graph(tuple(AWKWARD)))[0])
    figure, axis = plot_graph(graph(tuple(f"word{i}" for i in range(300))), most=4)
    draw(figure)
    assert len(axis.get_xticks()) < 300
    for most in (0, -1, True, 1.5, None):
        with pytest.raises(OptionError, match="most="):
            plot_graph(graph(), most=most)
    with pytest.raises(OptionError, match="by='relevance' is for graphs of whole activations"):
        plot_graph(graph(), by="relevance")
    with pytest.raises(OptionError, match="by='weight' is not known"):
        plot_graph(graph(), by="weight")
    edges = graph().edges.clone()
    edges[-1, 0] = float("nan")
    with pytest.raises(InputError, match="1 of the numbers in graph"):
        plot_graph(graph(edges=edges))
