"""Maps of images: every cell is the method that it names, and applies where it says something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import scene_image, vim, vit

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
)
from captum_ssm_bench import Cell
from captum_ssm_bench.experiments.image_maps import image_maps

MAPS = image_maps()

#: What a cell says of one class, called as a user would.
CALLS: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("ImplicitAttention", "s6"): (ImplicitAttention, {"components": "s6"}),
    ("ImplicitAttentionRollout", "unified"): (ImplicitAttentionRollout, {}),
    ("MambaAttribution", "unified"): (MambaAttribution, {}),
    ("LatimNorm l1", "silu"): (lambda model: LatimNorm(model, p=1, activation="silu"), {}),
    ("LatimALTI rollout", "linearized"): (LatimALTI, {}),
    ("LatimALTI mean", "silu"): (
        lambda model: LatimALTI(model, activation="silu"),
        {"aggregate": "mean"},
    ),
    ("LatimLogit", "linearized"): (LatimLogit, {}),
    ("LatimFlow", "patches"): (LatimFlow, {"rule": "frozen"}),
    ("LatimFlow", "balanced, patches"): (LatimFlow, {}),
    ("LatimFlow", "patches, against the mean class"): (
        LatimFlow,
        {"contrast": "mean", "rule": "frozen"},
    ),
    ("MambaLRP", "patches"): (MambaLRP, {}),
    ("TransformerAttribution", "gradient"): (
        lambda model: TransformerAttribution(model, form="gradient"),
        {},
    ),
}
ASKED = [4, 1]


def called(model: Any, image: Tensor, cell: tuple[str, str]) -> Tensor:
    """The method's answers to one class after the other, (T, 4, 4)."""
    kind, options = CALLS[cell]
    found = [kind(model).attribute(image, each, per_token=True, **options) for each in ASKED]
    return torch.cat(found)


@pytest.mark.parametrize("make", [vim, vit])
def test_a_cell_is_the_method_that_it_names(make: Any) -> None:
    model, image = make(), scene_image()
    for cell in CALLS:
        if MAPS[Cell(*cell)].applies(model):
            found = MAPS[Cell(*cell)].explain(model, image, ASKED)
            torch.testing.assert_close(found, called(model, image, cell), rtol=1e-5, atol=1e-7)
