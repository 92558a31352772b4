"""Finding objects: the columns of tables against the metrics' own classes, over several scenes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import MODELS, SCENES, SIDE, vim, vit

from captum_ssm import ImplicitAttentionRollout, MambaAttribution
from captum_ssm.metrics import SegmentationScores, pixel_relevance
from captum_ssm_bench import Cell, Key, lines
from captum_ssm_bench.experiments.segmentation import Segmenting, predicted
from captum_ssm_bench.tasks.scenes import SceneBatch, SceneTask

SEGMENTING = Segmenting(task=SCENES)


def scenes(task: SceneTask, count: int = 5) -> list[SceneBatch]:
    return [task.draw(1, int(torch.randint(2**31, ()))) for _ in range(count)]


def values(model: Any, examples: list[SceneBatch], cell: Cell) -> dict[str, float]:
    """The numbers of one cell's line."""
    results = [
        (Key("segmentation", "m", *cell, 0, i), SEGMENTING.measure(model, each, cell))
        for i, each in enumerate(examples)
    ]
    (line,) = lines(SEGMENTING, results)
    return {name: entry.value for name, entry in line.entries.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_table(name: str) -> None:
    model, examples = MODELS[name](), scenes(SCENES)
    found = values(model, examples, Cell("ImplicitAttentionRollout", "unified"))
    wanted = SegmentationScores()
    for example in examples:
        maps = ImplicitAttentionRollout(model).attribute(example.images, per_token=True)
        wanted.update(pixel_relevance(maps, (SIDE, SIDE)), (example.masks > 0).long())
    scores = wanted.compute()
    assert 0 <= found.pop("pointing") <= 1
    assert list(found) == ["mIoU", "pixel accuracy", "mAP", "mF1"]
    given = (scores.mean_iou, scores.pixel_accuracy, scores.mean_ap, scores.mean_f1)
    assert tuple(found.values()) == pytest.approx(given)


def test_maps_are_of_the_predicted_class() -> None:
    model, (example,) = vim(), scenes(SCENES, 1)
    rows = SEGMENTING.measure(model, example, Cell("MambaAttribution", "unified"))
    target = int(model(example.images)[0].argmax())
    assert predicted(model, example.images) == target
    wanted = SegmentationScores()
    found = MambaAttribution(model).attribute(example.images, target, per_token=True)
    wanted.update(pixel_relevance(found, (SIDE, SIDE)), (example.masks > 0).long())
    assert rows[""]["ap"] == wanted.compute().mean_ap and rows[""]["f1"] == wanted.compute().mean_f1


def test_cells_that_share_a_run_keep_their_numbers() -> None:
    model, (example,) = vim(), scenes(SCENES, 1)
    cells = SEGMENTING.chosen(["MambaAttribution", "LatimALTI rollout", "Saliency"])
    alone = [SEGMENTING.measure(model, example, cell) for cell in cells]
    with SEGMENTING.together():
        assert [SEGMENTING.measure(model, example, cell) for cell in cells] == alone


@pytest.mark.parametrize("name", MODELS)
def test_every_cell_has_its_numbers(name: str) -> None:
    model, (example,) = MODELS[name](), scenes(SCENES, 1)
    numbers = {number for column in SEGMENTING.columns for number in column.numbers}
    measured = {cell: SEGMENTING.measure(model, example, cell) for cell in SEGMENTING.cells()}
    assert sum(map(bool, measured.values())) >= 16
    for cell, rows in measured.items():
        for row in rows.values():
            assert set(row) == numbers and all(math.isfinite(x) for x in row.values()), cell
            assert row["given background"] + row["given object"] == SIDE**2, cell
    if name == "vit":
        assert SEGMENTING.measure(vit(), example, Cell("MambaAttribution", "s6")) == {}
