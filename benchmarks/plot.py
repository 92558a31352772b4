"""The table as a picture: time, peak memory and error against length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Columns drawn, from left to right.
PANELS = ("of f+b", "times its bound", "peak MiB", "error")


def draw(rows: Sequence[Mapping[str, Any]], path: Path, dpi: int = 110) -> None:
    """One line of panels per family, one curve per quantity."""
    from matplotlib import pyplot as plt

    families = list(dict.fromkeys(row["family"] for row in rows))
    names = list(dict.fromkeys(row["quantity"] for row in rows))
    colours = plt.get_cmap("tab20").colors
    style = {
        name: {"color": colours[i % len(colours)], "marker": "osD^v"[i % 5], "markersize": 4}
        for i, name in enumerate(names)
    }
    size = (4 * len(PANELS), 2.8 * len(families))
    fig, axes = plt.subplots(len(families), len(PANELS), figsize=size, squeeze=False)
    for family, line in zip(families, axes, strict=True):
        its = [row for row in rows if row["family"] == family]
        for column, ax in zip(PANELS, line, strict=True):
            for name in names:
                points = sorted(
                    (row["L"], row[column])
                    for row in its
                    if row["quantity"] == name and row[column]
                )
                if points:
                    ax.plot(*zip(*points, strict=True), **style[name])
            ax.set(xscale="log", yscale="log", title=f"{family}: {column}", xlabel="tokens")
            ax.set_xticks(lengths := sorted({row["L"] for row in its}), lengths, minor=False)
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            ax.set_visible(ax.has_data())
    handles = [plt.Line2D([], [], label=name, **style[name]) for name in names]
    fig.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    fig.set_layout_engine("constrained")
    fig.savefig(path, dpi=dpi)
    plt.close(fig)
