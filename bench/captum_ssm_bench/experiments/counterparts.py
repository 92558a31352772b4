"""Maps of images that models of several kinds have, or have counterparts of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..harness.experiment import Cell
from ..harness.tables import Line

#: By what the papers call them.
KINDS: Mapping[str, Sequence[Cell]] = {
    "raw attention": [Cell("ImplicitAttention", name) for name in ("s6", "unified")],
    "rollout": [Cell("ImplicitAttentionRollout", name) for name in ("s6", "unified")],
    "attribution": [
        *(Cell("MambaAttribution", name) for name in ("s6", "unified")),
        *(Cell("TransformerAttribution", name) for name in ("lrp", "gradient")),
    ],
    "whole network": [Cell("LatimFlow", "patches"), Cell("MambaLRP", "patches")],
    "no model": [Cell("brightness", "patches"), Cell("edges", "patches")],
}
#: The experiments in which they are compared, and by which row.
ROWS = {
    "segmentation": "",
    "image-perturbation": "predicted",
    "pseudo-masks": "background 0.5",
}


def counterparts(tables: Mapping[str, Sequence[Line]]) -> dict[str, list[tuple[str, Line]]]:
    """Of each experiment on images, the lines of these maps, those of one kind together.

    Args:
        tables: by the names of experiments, their lines.

    Returns:
        By experiment, each line after its kind; experiments without such lines are left out.
    """
    found = {}
    for name, row in ROWS.items():
        own = [line for line in tables.get(name, ()) if line.row == row]
        found[name] = [
            (kind, line)
            for kind, cells in KINDS.items()
            for line in own
            if Cell(line.method, line.formulation) in cells
        ]
    return {name: listed for name, listed in found.items() if listed}
