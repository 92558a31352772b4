"""Tables as dots with bars: each number at its place."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from captum_ssm.errors import InputError
from captum_ssm.viz.intervals import Interval, plot_intervals


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
    figure, axes = plot_intervals({"m": {"x": [none], "y": [(0.1, 0.2, 0.3)]}}, ["a"])
    bottom, top = axes[0].get_ylim()
    assert bottom > top  # the first row is at the top
    (dots,) = (line for line in axes[0].lines if line.get_marker() == "o")
    assert list(dots.get_xdata()) == [0.2]
    title = "words that say much " * 9  # is wrapped within the figure
    figure, _ = plot_intervals({"m": {"x": [interval()]}}, ["a"], title=title)
    figure.draw_without_rendering()
    (text,) = figure.texts
    assert text.get_text().split() == title.split()
    assert text.get_window_extent().width <= figure.bbox.width
    for groups, columns in (({}, ["a"]), ({"m": {}}, ["a"]), ({"m": {}}, [])):
        with pytest.raises(InputError, match="nothing to draw"):
            plot_intervals(groups, columns)
    with pytest.raises(InputError, match="row 'x' of 'm' has 1 intervals for 2 columns"):
        plot_intervals({"m": {"x": [interval()]}}, ["a", "b"])
