"""Removing pixels: the numbers of a cell against the metric called by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import MODELS, SCENES, vim, vit

from captum_ssm import ImplicitAttentionRollout, MambaAttribution
from captum_ssm.metrics import blurred, image_perturbation
from captum_ssm_bench import Cell
from captum_ssm_bench.experiments.pixel_removal import ImagePerturbation, areas
from captum_ssm_bench.tasks.scenes import SceneBatch

EXPERIMENT = ImagePerturbation(task=SCENES)
NUMBERS = {name for column in EXPERIMENT.columns for name in column.numbers}


def scene() -> SceneBatch:
    return SCENES.draw(1, int(torch.randint(2**31, ())))


def logits_of(model: Any, images: Tensor) -> Tensor:
    found = model(images)
    return found if isinstance(found, Tensor) else found.logits


def area_by_loops(model: Any, image: Tensor, relevance: Tensor, target: int, fill: Tensor) -> float:
    """The area under the accuracy while the most relevant pixels go, 10 % to 90 %."""
    order = relevance.flatten().argsort(descending=True, stable=True)
    right = []
    for tenth in range(1, 10):
        changed = image.clone().flatten(2)
        gone = order[: len(order) * tenth // 10]
        changed[:, :, gone] = fill.expand_as(image).flatten(2)[:, :, gone]
        with torch.no_grad():
            logits = logits_of(model, changed.view_as(image))
        right.append(float(logits.argmax() == target))
    return sum((a + b) / 2 for a, b in pairwise(right)) / 8


@pytest.mark.parametrize("name", MODELS)
def test_areas_are_those_of_loops(name: str) -> None:
    model, image = MODELS[name](), scene().images
    maps, classes = torch.randn(2, 16, 16), [4, int(logits_of(model, image).argmax())]
    fills = {
        "black": torch.tensor(-1.0),
        "mean": image.mean((2, 3), keepdim=True),
        "blur": blurred(image, 11 * 16 / 224),
    }
    found = areas(model, image, maps, classes)
    for numbers, relevance, target in zip(found, maps, classes, strict=True):
        for fill, value in fills.items():
            for direction, sign in (("positive", 1), ("negative", -1)):
                wanted = area_by_loops(model, image, sign * relevance, target, value)
                assert numbers[f"{direction}, {fill}"] == pytest.approx(wanted)


CELLS: dict[tuple[str, str], Callable[[Any, Tensor, int], Tensor]] = {
    ("MambaAttribution", "s6"): lambda model, image, target: MambaAttribution(model).attribute(
        image, target, components="s6", per_token=True
    ),
    ("ImplicitAttentionRollout", "unified"): lambda model, image, _: ImplicitAttentionRollout(
        model
    ).attribute(image, per_token=True),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_is_the_metric_of_its_map(cell: tuple[str, str]) -> None:
    model, example = vim(), scene()
    image = example.images
    rows = EXPERIMENT.measure(model, example, Cell(*cell))
    asked = {"predicted": int(logits_of(model, image).argmax()), "true": int(example.labels)}
    assert set(rows) == set(asked)
    for row, target in asked.items():
        assert set(rows[row]) == NUMBERS
        patches = CELLS[cell](model, image, target)
        pixels = F.interpolate(patches[None], (16, 16), mode="bilinear", align_corners=False)
        for direction, most_first in (("positive", True), ("negative", False)):
            wanted = image_perturbation(
                model, image, pixels, target, most_first=most_first, fill="mean"
            )
            assert rows[row][f"{direction}, mean"] == float(wanted.correct.area())


def test_what_has_nothing_to_say_gives_no_rows() -> None:
    assert EXPERIMENT.measure(vit(), scene(), Cell("ImplicitAttention", "s6")) == {}


def test_better_is_a_low_positive_and_a_high_negative_area() -> None:
    better = {column.name: column.better for column in EXPERIMENT.columns}
    assert better["positive, black"] == "low" and better["negative, black"] == "high"
    assert len(better) == 6


@pytest.mark.parametrize("name", MODELS)
def test_every_cell_has_its_numbers(name: str) -> None:
    model, example = MODELS[name](), scene()
    measured = {cell: EXPERIMENT.measure(model, example, cell) for cell in EXPERIMENT.cells()}
    assert sum(map(bool, measured.values())) > 20
    for cell, rows in measured.items():
        assert list(rows) in ([], ["predicted", "true"]), cell
        for numbers in rows.values():
            assert set(numbers) == NUMBERS, cell
            assert all(0 <= x <= 1 for x in numbers.values()), cell
