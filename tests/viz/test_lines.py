"""Lines, and tables as dots with bars: each number at its place."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from helpers.pictures import draw

from captum_ssm.errors import InputError
from captum_ssm.metrics import Curve
from captum_ssm.viz import plot_curves, plot_layers
from captum_ssm.viz.intervals import Interval, plot_intervals


def curve(examples: int = 5) -> Curve:
    return Curve(torch.tensor([0.1, 0.4, 0.9]), torch.rand(examples, 3, dtype=torch.float64))


def test_profiles_are_drawn_by_layer() -> None:
    profiles = {"$a$": torch.randn(5), "b": [0.5, -0.25]}
    figure, axis = plot_layers(profiles, quantity="$q", title="$t")
    for line, values in zip(axis.lines, profiles.values(), strict=False):
        np.testing.assert_allclose(line.get_ydata(), torch.as_tensor(values).numpy())
        assert line.get_xdata().tolist() == list(range(len(values)))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [r"\$a\$", "b"]
    draw(figure)
    assert not plot_layers([1.0, 2.0])[0].legends
    assert plot_layers([0.3, 0.1], logarithmic=True)[1].get_yscale() == "log"
    with pytest.raises(InputError, match="one number per layer"):
        plot_layers({"a": torch.rand(2, 2)})


def test_curves_are_means_with_standard_errors_and_areas() -> None:
    curves = {"one": curve(), "two": curve()}
    figure, axis = plot_curves(curves, quantity="accuracy", change="pixels masked")
    draw(figure)
    for (name, found), line, band in zip(curves.items(), axis.lines, axis.collections, strict=True):
        np.testing.assert_allclose(line.get_ydata(), found.values.mean(0))
        assert line.get_label() == f"{name}  area {float(found.area().mean()):.3g}"
        heights = band.get_paths()[0].vertices[:, 1]
        error = found.values.std(0) / 5**0.5
        assert heights.max() == pytest.approx(float((found.values.mean(0) + error).max()))
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("pixels masked", "accuracy")


def test_one_example_has_no_band_and_one_share_no_area() -> None:
    assert not plot_curves({"a": curve(1)})[1].collections
    figure, axis = plot_curves(Curve(torch.tensor([0.5]), torch.rand(3, 1)))
    assert "area" not in axis.lines[0].get_label()
    draw(figure)


def interval() -> Interval:
    low, value, high = sorted(random.random() for _ in range(3))
    return low, value, high


def test_dots_and_bars_stand_beside_their_labels() -> None:
    table = {
        "$one$": {f"row {i}": [interval(), interval()] for i in range(3)},
        "two": {f"row {i}": [interval(), interval()] for i in range(2)},
    }
    _, axes = plot_intervals(table, ["a", "b"], title="A title")
    labels = [text.get_text() for text in axes[0].get_yticklabels()]
    ticks = list(axes[0].get_yticks())
    assert labels == ["", r"\$one\$", "row 0", "row 1", "row 2", "", "two", "row 0", "row 1", ""]
    places = {"$one$": 2, "two": 7}
    for column, axis in enumerate(axes):
        assert axis.get_title() == "ab"[column]
        dotted = [line for line in axis.lines if line.get_marker() == "o"]
        for heading, dots, bars in zip(table, dotted, axis.collections, strict=True):
            rows = list(table[heading].values())
            where = [ticks[places[heading] + i] for i in range(len(rows))]
            np.testing.assert_array_equal(dots.get_ydata(), where)
            np.testing.assert_array_equal(dots.get_xdata(), [row[column][1] for row in rows])
            for segment, row, y in zip(bars.get_segments(), rows, where, strict=True):
                low, _, high = row[column]
                np.testing.assert_allclose(segment, [[low, y], [high, y]])


def test_odd_tables() -> None:
    none = (math.nan, math.nan, math.nan)
    _, axes = plot_intervals({"m": {"x": [none], "y": [(0.1, 0.2, 0.3)]}}, ["a"])
    bottom, top = axes[0].get_ylim()
    assert bottom > top  # the first row is at the top
    (dots,) = (line for line in axes[0].lines if line.get_marker() == "o")
    assert list(dots.get_xdata()) == [0.2]
    for groups, columns in (({}, ["a"]), ({"m": {}}, ["a"]), ({"m": {}}, [])):
        with pytest.raises(InputError, match="nothing to draw"):
            plot_intervals(groups, columns)
    with pytest.raises(InputError, match="row 'x' of 'm' has 1 intervals for 2 columns"):
        plot_intervals({"m": {"x": [interval()]}}, ["a", "b"])
