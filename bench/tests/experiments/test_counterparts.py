"""Maps of images that models of several kinds share."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS, Line
from captum_ssm_bench.experiments.counterparts import KINDS, ROWS, counterparts


def line(model: str, method: str, formulation: str, row: str = "") -> Line:
    return Line(model, method, formulation, row, 1, 1, {})


def test_all_of_them_are_measured() -> None:
    known = {name: set(EXPERIMENTS[name].cells()) for name in ROWS}
    for cells in KINDS.values():
        for cell in cells:
            assert cell in known["segmentation"] and cell in known["image-perturbation"]
    by_class = [*KINDS["attribution"], *KINDS["whole network"]]
    assert all(cell in known["pseudo-masks"] for cell in by_class)


def test_the_lines_of_one_kind_stand_together() -> None:
    flow = line("vit", "LatimFlow", "patches")
    ours = line("vim", "MambaAttribution", "s6")
    theirs = line("vit", "TransformerAttribution", "lrp")
    raw = line("vim", "ImplicitAttention", "s6")
    others = [line("vim", "ImplicitAttention", "exact"), line("vim", "LatimFlow", "pixels")]
    table = [flow, ours, *others, theirs, raw]
    assert counterparts({"segmentation": table, "copying": table}) == {
        "segmentation": [
            ("raw attention", raw),
            ("attribution", ours),
            ("attribution", theirs),
            ("whole network", flow),
        ]
    }


def test_of_several_rows_one_is_taken() -> None:
    rows = [line("vim", "LatimFlow", "patches", row) for row in ("predicted", "true")]
    assert counterparts({"image-perturbation": rows}) == {
        "image-perturbation": [("whole network", rows[0])]
    }
    assert counterparts({"image-perturbation": rows[1:], "pseudo-masks": []}) == {}
