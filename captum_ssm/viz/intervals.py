"""Draw tables of values and their confidence intervals as dots and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .figure import LINES, new_figure
from .labels import plot_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: (lower bound, value, upper bound); all NaN if there is no value.
Interval = tuple[float, float, float]

#: Sizes in inches: a line, a panel, a label's character, a title's character, the margins.
_LINE, _PANEL, _CHARACTER, _TITLE_CHARACTER, _AROUND = 0.155, 2.1, 0.068, 0.088, 0.9


def plot_intervals(
    groups: Mapping[str, Mapping[str, Sequence[Interval]]],
    columns: Sequence[str],
    *,
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw a table of intervals, with a line for each row and a panel for each column.

    Args:
        groups: a mapping from headings to mappings from row labels to one interval per column:
            lower bound, value and upper bound, NaN without a number.
        columns: the names of the columns.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes, one per column.

    Raises:
        InputError: when groups or columns is empty, or a row has too few or too many intervals.

    Example:
        >>> from captum_ssm.viz import plot_intervals
        >>> table = {"a model": {"a method": [(0.1, 0.2, 0.4)], "another": [(0.5, 0.6, 0.7)]}}
        >>> figure, axes = plot_intervals(table, ["AUC"])
        >>> [label.get_text() for label in axes[0].get_yticklabels()]
        ['', 'a model', 'a method', 'another', '']
    """
    _check(groups, columns)
    labels = [""]  # from the top: a heading, its rows, an empty line, and so on
    headings: list[int] = []
    for heading, rows in groups.items():
        headings.append(len(labels))
        labels += [plot_label(heading), *map(plot_label, rows), ""]
    width = _PANEL * len(columns) + _CHARACTER * max(map(len, labels))
    heading_lines = wrap(title or "", int(width / _TITLE_CHARACTER))
    height = _LINE * (len(labels) + len(heading_lines)) + _AROUND
    figure, axes = new_figure(width, height, ncols=len(columns), sharey=True, squeeze=False)
    for column, (axis, name) in enumerate(zip(axes[0], columns, strict=True)):
        for color, (line, rows) in enumerate(zip(headings, groups.values(), strict=True)):
            intervals = [row[column] for row in rows.values()]
            _draw_intervals(axis, line + 1, intervals, LINES[color % len(LINES)])
        axis.set_title(plot_label(name), size=9)
        axis.tick_params(axis="x", labelsize=7, top=True, labeltop=True)
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="x", linewidth=0.4, color="0.85")
        axis.set_axisbelow(True)
        axis.spines[["left", "right"]].set_visible(False)
    first = axes[0, 0]
    first.set_ylim(len(labels) - 1, 0)
    first.set_yticks(range(len(labels)), labels, fontsize=7)
    for line in headings:
        first.get_yticklabels()[line].set_fontweight("bold")
    if heading_lines:
        figure.suptitle("\n".join(map(plot_label, heading_lines)), size=10)
    return figure, axes[0]


def _draw_intervals(axis: Any, first: int, intervals: Sequence[Interval], color: str) -> None:
    """Draw a dot and a bar for each interval, from line ``first`` down; nothing for NaN."""
    by_line = {line: x for line, x in enumerate(intervals, first) if not math.isnan(x[1])}
    lines = list(by_line)
    for line in lines:
        axis.axhline(line, linewidth=0.3, color="0.9", zorder=0)
    low, value, high = ([x[part] for x in by_line.values()] for part in range(3))
    axis.hlines(lines, low, high, color, linewidth=1.2)
    axis.plot(value, lines, "o", color=color, markersize=3)


def _check(groups: Mapping[str, Mapping[str, Sequence[Interval]]], columns: Sequence[str]) -> None:
    """Raise InputError unless there is a row, a column, and one interval per row and column."""
    if not columns or not any(groups.values()):
        raise InputError("groups or columns is empty: nothing to draw. Pass a row and a column.")
    for heading, rows in groups.items():
        for label, intervals in rows.items():
            if len(intervals) != len(columns):
                raise InputError(
                    f"groups: the row {label!r} of {heading!r} has {len(intervals)} intervals for "
                    f"{len(columns)} columns. Pass one interval per column."
                )
