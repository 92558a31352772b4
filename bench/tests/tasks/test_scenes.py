"""Scenes: training and testing share no background, and cues are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("skimage")

import skimage.data

from captum_ssm_bench.tasks.scenes import SCENES, SceneTask
from captum_ssm_bench.tasks.textures import PHOTOGRAPHS, photographs

PATCH = 4


@pytest.mark.parametrize("polarity", ["random", "bright"])
@pytest.mark.parametrize("objects", [1, 2])
def test_scenes_show_so_many_objects(polarity: Any, objects: int, seed: int) -> None:
    scenes = SceneTask(size=45, objects=objects, polarity=polarity).draw(7, seed)
    assert scenes.images.shape == (7, 3, 45, 45) and scenes.images.dtype == torch.float32
    assert scenes.images.abs().max() <= 2
    for image, mask in zip(scenes.images, scenes.masks, strict=True):
        assert len(mask.unique()) == objects + 1, "the background and a class for each object"
        if polarity == "bright":
            assert image[:, mask > 0].mean() > image[:, mask == 0].mean() + 0.2


@pytest.mark.parametrize("objects", [1, 2])
def test_the_label_is_the_class_of_most_pixels(objects: int, seed: int) -> None:
    scenes = SceneTask(objects=objects).draw(60, seed)
    seen = set()
    for label, mask in zip(scenes.labels.tolist(), scenes.masks, strict=True):
        counts = {c: int((mask == c + 1).sum()) for c in range(len(SCENES.classes))}
        assert counts[label] == max(counts.values()) > 0
        seen.add(label)
    assert len(seen) >= 5
    assert scenes.labels.dtype == scenes.masks.dtype == torch.int64


def test_the_same_seed_draws_the_same_scenes(seed: int) -> None:
    one, again, other = (SCENES.draw(3, each) for each in (seed, seed, seed + 1))
    for name in ("images", "labels", "masks"):
        assert torch.equal(getattr(one, name), getattr(again, name))
    assert not torch.equal(one.images, other.images)
    before = torch.get_rng_state()
    SCENES.draw(1, seed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def fresh_photographs() -> Iterator[None]:
    photographs.cache_clear()
    yield
    photographs.cache_clear()


@pytest.mark.usefixtures("fresh_photographs")
@pytest.mark.parametrize("blackened", ["left", "right"])
def test_training_sees_left_halves_and_tests_right_ones(
    blackened: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def drawn() -> dict[bool, Tensor]:
        return {held_out: SCENES.draw(12, seed, held_out).images for held_out in (False, True)}

    def half_black(photograph: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            pixels = photograph().copy()
            middle = pixels.shape[1] // 2
            pixels[:, slice(None, middle) if blackened == "left" else slice(middle, None)] = 0
            return pixels

        return read

    before = drawn()
    photographs.cache_clear()
    for name in PHOTOGRAPHS:
        monkeypatch.setattr(skimage.data, name, half_black(getattr(skimage.data, name)))
    after = drawn()
    seen = blackened == "right"  # by the held-out scenes alone
    for held_out in (False, True):
        changed = (before[held_out] != after[held_out]).flatten(1).any(1)
        assert changed.all() if held_out == seen else not changed.any()


def _patch_auc(maps: Tensor, masks: Tensor) -> float:
    """How well the means of a map over patches tell those of the object, on average over scenes."""
    scores = F.avg_pool2d(maps[:, None], PATCH).flatten(1)
    gold = F.avg_pool2d((masks > 0).float()[:, None], PATCH).flatten(1) > 0.5
    above = (scores[:, :, None] > scores[:, None, :]).double()  # all pairs of patches
    pairs = gold[:, :, None] & ~gold[:, None, :]
    return float(((above * pairs).sum((1, 2)) / pairs.sum((1, 2))).nanmean())


def _edges(images: Tensor) -> Tensor:
    grey = images.mean(1)
    across = F.pad(grey.diff(dim=2), (0, 1)).abs()
    return across + F.pad(grey.diff(dim=1), (0, 0, 0, 1)).abs()


def test_the_trap_of_bright_objects(seed: int) -> None:
    """Where objects are brighter than all else, no model is needed to find them."""
    scenes = SceneTask(polarity="bright").draw(60, seed)
    assert _patch_auc(scenes.images.mean(1), scenes.masks) >= 0.96


def test_neither_brightness_nor_edges_give_objects_away(seed: int) -> None:
    scenes = SCENES.draw(200, seed)
    assert 0.38 <= _patch_auc(scenes.images.mean(1), scenes.masks) <= 0.62
    assert _patch_auc(_edges(scenes.images), scenes.masks) <= 0.7
