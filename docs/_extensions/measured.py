"""Tables and pictures of measured numbers, read from their csv files when the pages are built.

The argument of ``measured`` is a table as ``captum-ssm-bench evaluate`` writes it, by its place
beside the page. Options choose of it, several names apart by ``|``: ``models``, ``methods`` (a
name, or all that tells a line apart), ``rows`` and ``columns``. ``best`` keeps so many lines of
each model, of each method and formulation the best one by the first column; ``lowest`` says that
low is good there. ``pivot`` makes a table of models and lines, ``picture`` draws and says in words
how. ``frontier`` does so of lines by their passes. ``whole`` names columns of whole numbers.

The role of the same name inserts one number into a sentence: ``TABLE; MODEL; LINE; COLUMN``, with a
table of ``docs/results`` without its ending. A fifth part is a format other than ``.2f``, or
``interval`` for the number with its interval.
"""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import matplotlib.pyplot as plt
from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib.figure import Figure
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.typing import ExtensionMetadata

from captum_ssm.viz import plot_intervals

Row = Mapping[str, str]
OPTIONS = ("models", "methods", "rows", "columns", "best", "lowest", "pivot", "picture", "frontier")
WHOLE = "whole"
RESULTS = Path(__file__).parents[1] / "results"


def names(options: Row, name: str) -> list[str]:
    """The names that an option lists."""
    return [each.strip() for each in (options.get(name) or "").split("|") if each.strip()]


def label(row: Row) -> str:
    """All that tells a line apart from others of its model."""
    return ", ".join(filter(None, map(row.get, ("method", "formulation", "row", "layers"))))


def interval(row: Row, column: str) -> tuple[float, float, float]:
    """The lower bound, the value and the upper bound."""
    return float(row[f"{column} low"]), float(row[column]), float(row[f"{column} high"])


def entry(row: Row, column: str) -> str:
    """The value with its interval."""
    low, value, high = (f"{round(x, 3) + 0.0:.3f}" for x in interval(row, column))
    return "-" if math.isnan(float(row[column])) else f"{value} [{low}, {high}]"


def count(row: Row, column: str) -> str:
    """The value as a whole number."""
    return f"{float(row[column]):.0f}"


def number(text: str) -> str:
    """The number of a role's text."""
    table, model, line, column, *spec = (" ".join(part.split()) for part in text.split(";"))
    with (RESULTS / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        (row,) = (r for r in csv.DictReader(file) if (r["model"], label(r)) == (model, line))
    if spec == ["interval"]:
        return entry(row, column)
    return format(float(row[column]), *(spec or [".2f"])).replace("%", " %")


def chosen(rows: Sequence[Row], options: Row) -> list[Row]:
    """The lines that are asked for, models and lines in the order in which they are named."""
    methods, parts, best = names(options, "methods"), names(options, "rows"), options.get("best")
    found: list[Row] = []
    for model in names(options, "models") or dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        if parts:
            own = [row for row in own if row["row"] in parts]
        if len(parts) == 1:  # then it tells no lines apart
            own = [{**row, "row": ""} for row in own]
        if methods:
            own = [row for row in own if {row["method"], label(row)} & set(methods)]
            order = {name: place for place, name in enumerate(methods)}
            own.sort(key=lambda row: order.get(label(row), order.get(row["method"], 0)))
        if best:
            first, sign = columns_of(rows, options)[0], 1 if "lowest" in options else -1
            own = [row for row in own if not math.isnan(float(row[first]))]
            own.sort(key=lambda row: sign * float(row[first]))
            once = {(row["method"], row["formulation"]): row for row in reversed(own)}
            own = [row for row in own if row in once.values()][: int(best)]
        found += own
    return found


def columns_of(rows: Sequence[Row], options: Row) -> list[str]:
    """The columns that are asked for, or all that have intervals."""
    return names(options, "columns") or [name for name in rows[0] if f"{name} low" in rows[0]]


def table(rows: Sequence[Row], options: Row) -> list[list[str]]:
    """The cells that are asked for, the headings first."""
    found, columns = chosen(rows, options), columns_of(rows, options)
    if "pivot" in options:
        lines, models = dict.fromkeys(map(label, found)), dict.fromkeys(r["model"] for r in found)
        cells = {(row["model"], label(row)): f"{float(row[columns[0]]):.2f}" for row in found}
        return [["model", *lines], *([m, *(cells.get((m, x), "") for x in lines)] for m in models)]
    cells_of = {c: entry for c in columns} | {c: count for c in names(options, WHOLE)}
    body = [[r["model"], label(r), *(cells_of[c](r, c) for c in columns)] for r in found]
    return [["model", "line", *columns], *body]


class Number(SphinxRole):
    """The role."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """The number as text; the build fails where a table lacks it."""
        return [nodes.Text(number(self.text))], []


def frontier(rows: Sequence[Row], columns: Sequence[str]) -> Figure:
    """Draw each column against the passes of each line, with intervals."""
    figure, axes = plt.subplots(1, len(columns), figsize=(4.4 * len(columns) + 3.6, 4.2))
    colors = [plt.get_cmap("tab20")(place) for place in (*range(0, 20, 2), *range(1, 20, 2))]
    for column, ax in zip(columns, axes, strict=True):
        taken: dict[float, int] = {}
        for row, color in zip(rows, colors, strict=False):
            (low, value, high), passes = interval(row, column), float(row["passes"])
            beside = taken[passes] = taken.get(passes, -1) + 1  # lines of one cost side by side
            spread, about = 1.07**beside, [[value - low], [high - value]]
            ax.errorbar(passes * spread, value, about, fmt="o", color=color, label=label(row))
        ax.set(xscale="log", xlabel="passes", title=column)
        ax.set_xticks([2**power for power in range(1, 7)], [2**power for power in range(1, 7)])
        ax.minorticks_off()
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


class Measured(SphinxDirective):
    """The directive."""

    required_arguments = 1
    option_spec = dict.fromkeys((*OPTIONS, WHOLE), directives.unchanged)

    def run(self) -> list[nodes.Node]:
        """The table or the picture."""
        relative, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        said = self.options.get("frontier") or self.options.get("picture")
        if said is None:
            lines = [f"| {' | '.join(each)} |" for each in table(rows, self.options)]
            lines.insert(1, "|" + " --- |" * (lines[0].count("|") - 1))
            return self.parse_text_to_nodes("\n".join(lines))
        found, columns = chosen(rows, self.options), columns_of(rows, self.options)
        if "frontier" in self.options:
            return [_image(frontier(found, columns), said)]
        groups: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
        for row in found:
            groups.setdefault(row["model"], {})[label(row)] = [interval(row, c) for c in columns]
        return [_image(plot_intervals(groups, columns)[0], said)]


def _image(figure: Figure, said: str) -> nodes.Node:
    """A picture inside the page, with its words."""
    drawn = io.BytesIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": said}):  # the same at each build
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    source = f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"
    return nodes.raw("", f'<p><img alt="{escape(said)}" src="{source}"/></p>', format="html")


def setup(app: Sphinx) -> ExtensionMetadata:
    """Add the directive and the role."""
    app.add_directive("measured", Measured)
    app.add_role("measured", Number())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
