"""Arcs of edges, and curves of windows: where they are drawn, and what is said beside them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import AWKWARD, draw

from captum_ssm import EdgeEffects
from captum_ssm.edges import Edge, KnockoutWindows
from captum_ssm.errors import InputError
from captum_ssm.models import load_bundled
from captum_ssm.viz import plot_edges, plot_windows

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
    assert said == ["speaks for the output", "speaks against it"]


@pytest.mark.slow
def test_arcs_that_meet_at_a_word_do_not_cross() -> None:
    both_ways = [*itertools.product(range(5), repeat=2)]
    edges = [edge(i, j, 1.0, layer) for layer in range(2) for i, j in both_ways]
    _, (axis,) = plot_edges(WORDS, edges)
    ends = arcs(axis)
    assert len({x for pair in ends for x in pair}) == 100

    def cross(one: tuple[float, float], other: tuple[float, float]) -> bool:
        (a, b), (c, d) = sorted((sorted(one), sorted(other)))
        return a < c < b < d

    tokens = [(edge.source, edge.target) for edge in reversed(edges)]
    for i, j in itertools.combinations(range(50), 2):
        assert cross(ends[i], ends[j]) == cross(tokens[i], tokens[j])


def test_a_row_for_each_layer() -> None:
    edges = [edge(0, 1, 1.0, layer=3), edge(1, 2, 8.0, layer=3), edge(0, 4, -2.0, layer=7)]
    figure, (first, second) = plot_edges(WORDS, edges, by_layer=True)
    draw(figure)
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["layer 3", "layer 7"]
    assert len(first.patches), len(second.patches) == (2, 1)
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
    assert "w60" not in labels
    assert len(labels) < 60
    assert [label for label in labels if label != "⋮"] == sorted(
        (label for label in labels if label != "⋮"), key=lambda label: int(label[1:])
    )
    at = dict(zip(labels, axis.get_xticks(), strict=True))
    for begins, stops in arcs(axis):
        assert min(abs(begins - at["w20"]), abs(begins - at["w100"])) < 1
        assert abs(stops - at["w250"]) < 1


@pytest.mark.slow
def test_awkward_tokens_and_the_edges_of_a_real_model() -> None:
    figure, _ = plot_edges(AWKWARD, [edge(0, len(AWKWARD) - 1, 0.0)])
    draw(figure)
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode("anna owns the lamp . ? anna owns the")])
    edges = EdgeEffects(model).attribute(ids, (-1, 3)).top(12)[0]
    figure, axes = plot_edges(vocabulary.tokens(ids[0]), edges, by_layer=True)
    draw(figure)
    assert sum(len(axis.patches) for axis in axes) == 12


def test_it_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(InputError, match="edges is empty"):
        plot_edges(WORDS, [])
    for ends in ((5, 1), (1, -1)):
        with pytest.raises(InputError, match=r"edges names token (5|-1), but there are 5"):
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
    assert axis.get_xlabel() == "layer in the middle of a window of 3"
    assert len(axis.collections) == 2
    # one example has no band, and one layer is no window
    found = windows(1, plain=torch.tensor([0.5]), probabilities=torch.rand(2, 4, 1))
    figure, axis = plot_windows(found)
    draw(figure)
    assert not axis.collections and axis.get_xlabel() == "layer"
    with pytest.raises(InputError, match="NaN"):
        plot_windows(windows(plain=torch.zeros(2), probabilities=torch.zeros(2, 4, 2)))
