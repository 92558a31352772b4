"""Finding objects: the columns of tables against the metrics' own classes, over several scenes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import CLASSES, MODELS, SCENES, SIDE, vim, vit
from oracles import relative_error

from captum_ssm import ImplicitAttentionRollout, MambaAttribution
from captum_ssm.metrics import PseudoMaskScores, SegmentationScores, pixel_relevance, pseudo_masks
from captum_ssm_bench import Cell, Experiment, Key, Line, Rows, lines
from captum_ssm_bench.experiments.masks import (
    BACKGROUND_SCORES,
    PseudoMasks,
    Segmenting,
    mask_scores,
    masks,
    pixel_counts,
)
from captum_ssm_bench.tasks.scenes import SceneBatch, SceneTask

SEVERAL = SceneTask(size=SIDE, objects=2)
SEGMENTING, PSEUDO = Segmenting(task=SCENES), PseudoMasks(task=SEVERAL)
NAMES = ("background", *SCENES.classes)


def scenes(task: SceneTask, count: int = 5) -> list[SceneBatch]:
    return [task.draw(1, int(torch.randint(2**31, ()))) for _ in range(count)]


def logits_of(model: Any, images: Tensor) -> Tensor:
    found = model(images)
    return found if isinstance(found, Tensor) else found.logits


def table(experiment: Experiment, model: Any, examples: list[SceneBatch], cell: Cell) -> list[Line]:
    """The lines of one cell's table."""
    results: list[tuple[Key, Rows]] = []
    for index, example in enumerate(examples):
        key = Key(experiment.name, "model", *cell, 0, index)
        results.append((key, experiment.measure(model, example, cell)))
    return lines(experiment, results)


def values(line: Line) -> dict[str, float]:
    return {name: entry.value for name, entry in line.entries.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_segmentation(name: str) -> None:
    model, examples = MODELS[name](), scenes(SCENES)
    (line,) = table(SEGMENTING, model, examples, Cell("ImplicitAttentionRollout", "unified"))
    wanted = SegmentationScores()
    for example in examples:
        found = ImplicitAttentionRollout(model).attribute(example.images, per_token=True)
        gold = torch.where(example.masks == 0, 0, 1)
        wanted.update(pixel_relevance(found, (SIDE, SIDE)), gold)
    scores = wanted.compute()
    found = values(line)
    assert 0 <= found.pop("pointing") <= 1
    assert found == pytest.approx(
        {
            "mIoU": scores.mean_iou,
            "pixel accuracy": scores.pixel_accuracy,
            "mAP": scores.mean_ap,
            "mF1": scores.mean_f1,
        }
    )
    for entry in line.entries.values():
        assert entry.low <= entry.value <= entry.high


@pytest.mark.parametrize(
    ("peaks", "share"), [([(0, 0)], 1.0), ([(1, 2)], 0.0), ([(0, 0), (0, 1), (1, 2)], 2 / 3)]
)
def test_pointing_is_the_share_of_the_peak_on_the_object(
    peaks: list[tuple[int, int]], share: float
) -> None:
    found, gold = torch.zeros(1, 2, 3), torch.tensor([[[1, 1, 0], [1, 0, 0]]])
    for row, column in peaks:
        found[0, row, column] = 2
    assert mask_scores(found, gold)["pointing"] == pytest.approx(share)


def test_segmentation_is_of_the_predicted_class() -> None:
    model, (example,) = vim(), scenes(SCENES, 1)
    rows = SEGMENTING.measure(model, example, Cell("MambaAttribution", "unified"))
    target = int(logits_of(model, example.images).argmax())
    wanted = SegmentationScores()
    found = MambaAttribution(model).attribute(example.images, target, per_token=True)
    wanted.update(pixel_relevance(found, (SIDE, SIDE)), (example.masks > 0).long())
    assert rows[""]["ap"] == wanted.compute().mean_ap
    assert rows[""]["f1"] == wanted.compute().mean_f1


def test_the_table_of_pseudo_masks() -> None:
    model, examples, cell = vim(), scenes(SEVERAL), Cell("MambaAttribution", "s6")
    table_lines = table(PSEUDO, model, examples, cell)
    assert len(table_lines) == len(BACKGROUND_SCORES)
    for line in table_lines:
        wanted = PseudoMaskScores(classes=len(NAMES), ignored=None)
        for example in examples:
            shown = [c for c in range(CLASSES) if (example.masks == c + 1).any()]
            # the very same numbers: where two maps have their peaks, rounding decides
            found = PSEUDO.maps[cell].explain(model, example.images, shown)
            maps, present = torch.zeros(1, CLASSES, SIDE, SIDE), torch.zeros(1, CLASSES)
            maps[0, shown], present[0, shown] = pixel_relevance(found, (SIDE, SIDE)), 1.0
            score = float(line.row.removeprefix("background "))
            wanted.update(pseudo_masks(maps, present, score), example.masks)
        *by_class, mean = wanted.compute().tolist()
        found_values = values(line)
        assert found_values.pop("mIoU") == pytest.approx(mean)
        assert list(found_values) == list(NAMES)
        assert list(found_values.values()) == pytest.approx(by_class, nan_ok=True)


def test_pseudo_masks_are_of_the_classes_shown() -> None:
    model, (example,) = vim(), scenes(SEVERAL, 1)
    shown = [c for c in range(CLASSES) if (example.masks == c + 1).any()]
    found = PSEUDO.maps[Cell("MambaAttribution", "s6")].explain(model, example.images, shown)
    for map_, target in zip(found, shown, strict=True):
        (wanted,) = MambaAttribution(model).attribute(
            example.images, target, components="s6", per_token=True
        )
        assert relative_error(map_, wanted) <= 1e-5


def test_counts_of_perfect_masks() -> None:
    (example,) = scenes(SEVERAL, 1)
    numbers = pixel_counts(example.masks, example.masks, NAMES)
    assert len(numbers) == 3 * len(NAMES)
    for c, name in enumerate(NAMES):
        pixels = int((example.masks == c).sum())
        assert {numbers[f"{what} {name}"] for what in ("right", "true", "given")} == {pixels}


def test_a_pixel_takes_the_class_of_the_highest_map() -> None:
    left = torch.linspace(1, 0, SIDE).expand(SIDE, SIDE)
    found = masks(torch.stack([left, 9 * left.flip(1)]), [6, 2], 9, 0.6)
    assert set(found[0, :, 0].tolist()) == {7} and set(found[0, :, -1].tolist()) == {3}
    assert set(found[0, :, SIDE // 2].tolist()) == {0}


def test_pseudo_masks_are_of_methods_that_tell_classes_apart() -> None:
    methods = {cell.method for cell in PSEUDO.cells()}
    assert {"MambaAttribution", "LatimFlow", "CAM", "GradCAM", "Saliency"} <= methods
    assert not methods & {"ImplicitAttention", "ImplicitAttentionRollout", "LatimNorm l2"}
    assert not methods & {"brightness", "contrast", "edges", "random"}


def test_what_has_nothing_to_say_gives_no_rows() -> None:
    for experiment, task in ((SEGMENTING, SCENES), (PSEUDO, SEVERAL)):
        (example,) = scenes(task, 1)
        assert experiment.measure(vit(), example, Cell("MambaAttribution", "s6")) == {}


def test_brightness_finds_bright_objects_and_no_others() -> None:
    cell = Cell("brightness", "pixels")
    found = {}
    for polarity in ("bright", "random"):
        examples = scenes(SceneTask(polarity=polarity), 30)  # type: ignore[arg-type]
        (line,) = table(SEGMENTING, vim(), examples, cell)
        found[polarity] = values(line)
    assert found["bright"]["mAP"] >= 0.75
    assert found["random"]["mAP"] <= found["bright"]["mAP"] - 0.1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("experiment", [SEGMENTING, PSEUDO], ids=lambda e: e.name)
def test_every_cell_has_its_numbers(name: str, experiment: Any) -> None:
    model, (example,) = MODELS[name](), scenes(experiment.task, 1)
    numbers = {number for column in experiment.columns for number in column.numbers}
    measured = {cell: experiment.measure(model, example, cell) for cell in experiment.cells()}
    assert sum(map(bool, measured.values())) >= 16
    for cell, rows in measured.items():
        if rows:
            assert len(rows) == (1 if experiment is SEGMENTING else len(BACKGROUND_SCORES)), cell
        for row in rows.values():
            assert set(row) == numbers, cell
            assert all(math.isfinite(x) for x in row.values()), cell
            assert sum(x for key, x in row.items() if key.startswith("given")) == SIDE**2, cell
