"""The pictures of the first page of the results that are no dots with bars."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from captum_ssm.viz.figure import LINES, SEQUENTIAL, new_figure
from captum_ssm_bench.harness.tables import Entry
from captum_ssm_bench.harness.verdicts import Outcome

#: From where on scores cannot tell methods apart.
FULL = 0.995
#: The darkest of the colours on which black is still read with ease.
_DARKEST = 0.62


def draw(
    names: Sequence[str],
    columns: Mapping[object, str],
    entries: Mapping[tuple[str, object], Entry],
    counted: Iterable[object] = (),
) -> Figure:
    """Numbers with their intervals in a grid, darker where they are better in their column.

    Args:
        names: of the rows.
        columns: their headings.
        entries: by row and column.
        counted: columns of costs, which have no colour and no interval.
    """
    figure, axis = new_figure(2.4 + 1.45 * len(columns), 0.9 + 0.27 * len(names))
    colours = colormaps[SEQUENTIAL]
    for x, where in enumerate(columns):
        own = {name: entries[name, where] for name in names if (name, where) in entries}
        own = {name: entry for name, entry in own.items() if not math.isnan(entry.value)}
        if not own:
            continue
        low = min(entry.value for entry in own.values())
        span = max(entry.value for entry in own.values()) - low or 1
        full = [name for name, entry in own.items() if entry.value >= FULL]
        for name, entry in own.items():
            y, plain = names.index(name), where in counted
            shade = 0.0 if plain else _DARKEST * (entry.value - low) / span
            axis.add_patch(_cell(x, y, "white" if plain else colours(shade)))
            if plain:
                axis.text(x, y, f"{entry.value:.0f}", ha="center", va="center", size=9)
                continue
            same = " =" if len(full) > 1 and name in full else ""
            said = f"[{entry.low:.2f}, {entry.high:.2f}]"
            axis.text(x - 0.13, y, f"{entry.value:.2f}{same}", ha="right", va="center", size=10)
            axis.text(x - 0.08, y, said, ha="left", va="center", size=8)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xticks(range(len(columns)), list(columns.values()), fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axis.spines[:].set_visible(False)
    return figure


def _cell(x: int, y: int, colour: Any) -> Rectangle:
    return Rectangle((x - 0.49, y - 0.47), 0.98, 0.94, facecolor=colour, edgecolor="none")


def bars(tally: Mapping[str, Counter[str]]) -> Figure:
    """How many orderings of each table are confirmed, open and refuted."""
    shown = (Outcome.CONFIRMED, Outcome.OPEN, Outcome.REFUTED)
    colours = dict(zip(shown, (LINES[0], "0.85", LINES[1]), strict=True))
    figure, axis = new_figure(9, 0.9 + 0.26 * len(tally))
    left = dict.fromkeys(tally, 0)
    for outcome in shown:
        counts = {source: verdicts[outcome.value] for source, verdicts in tally.items()}
        drawn = axis.barh(
            list(counts),
            list(counts.values()),
            left=list(left.values()),
            color=colours[outcome],
            label=outcome.value,
        )
        axis.bar_label(
            drawn, [str(n) if n else "" for n in counts.values()], label_type="center", size=8
        )
        left = {source: left[source] + count for source, count in counts.items()}
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    axis.set_xlabel("orderings", fontsize=8)
    axis.tick_params(labelsize=8)
    return figure
