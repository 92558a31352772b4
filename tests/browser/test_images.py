"""Relevance over images, in the report and in Insights: it is seen on dark and bright objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Attribution
from helpers.browser import Page
from matplotlib.image import imread
from torch import Tensor
from zoo.small import CLASSES, vision

from captum_ssm import LatimFlow, report
from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, ImageFeature
from captum_ssm.insights.methods import ATTRIBUTION_NAMES_TO_METHODS

ROWS, COLUMNS = 4, 6
#: Height and width of a patch.
PATCH = (4, 3)
#: Row and column of the patches with relevance, and what it is: of each sign one on a dark object
#: and one on a bright one.
PLANTED = {(0, 1): 1.0, (2, 1): -1.0, (0, 4): 1.0, (2, 4): -1.0}
DARK, BRIGHT = 0.06, 0.94
#: What WCAG 2.2 asks of graphics that must be told from what lies beside them.
ENOUGH = 3.0


def scene() -> Tensor:
    """An image (1, 3, H, W): its left half is dark, its right half bright."""
    image = torch.full((1, 3, ROWS * PATCH[0], COLUMNS * PATCH[1]), DARK)
    image[..., COLUMNS // 2 * PATCH[1] :] = BRIGHT
    return image


class Planted(Attribution):
    """Finds the same relevance in every image, in the upper pixels of a few patches."""

    rows = PATCH[0]  # all of them

    get_name = classmethod(lambda cls: "Planted")

    def attribute(
        self, inputs: Any, target: Any = None, additional_forward_args: Any = None
    ) -> Tensor:
        found = torch.zeros_like(scene())
        for (row, column), value in PLANTED.items():
            rows = slice(row * PATCH[0], row * PATCH[0] + self.rows)
            found[..., rows, column * PATCH[1] : (column + 1) * PATCH[1]] = value
        return found


def luminance(colours: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB (..., 3) in 0 to 1 (WCAG 2.2)."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrast(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dark, bright = np.sort(np.stack(np.broadcast_arrays(luminance(a), luminance(b))), axis=0)
    return (bright + 0.05) / (dark + 0.05)


@pytest.fixture(params=["#picture", ".stack"])
def opened(
    request: pytest.FixtureRequest, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], tuple[Page, str]]]:
    """Opens a report or Insights with the planted relevance; names what holds the image."""
    model, holder = vision("middle", (ROWS, COLUMNS)), request.param
    monkeypatch.setitem(ATTRIBUTION_NAMES_TO_METHODS, "Planted", Planted)
    feature, names = ImageFeature("photo", None, None), [f"class {i}" for i in range(CLASSES)]
    visualizer = AttributionVisualizer(model, names, feature, [Batch(scene(), None)])
    visualizer.config = FilterConfig("Planted")

    def open_() -> tuple[Page, str]:
        if holder == "#picture":
            path = report(model, scene(), [Planted, LatimFlow], path=tmp_path / "scene.html")
            page.goto(path)
        else:
            visualizer.serve()
            page.goto(visualizer.url)
            page.wait_for("document.querySelectorAll('.stack canvas').length === 1")
        return page, holder

    with visualizer:
        yield open_
    assert page.errors == [] and page.dialogs == []
    assert all(url.startswith(("file:", "http://127.0.0.1:")) for url in page.requests)


def manner(page: Page, name: str) -> None:
    """Choose how relevance lies over the image, by keys."""
    page.focus("#over-image select")
    page.keys("Home")
    for _ in range(["patches", "outlines", "pixels"].index(name)):
        page.keys("ArrowDown")
    page.wait_for(f"document.querySelector('#over-image select').value === '{name}'")
    page.drawn()


def seen(page: Page, holder: str, path: Path) -> np.ndarray:
    """What is seen of the image, (H, W, 3) in 0 to 1."""
    page.scroll_to(f"{holder} canvas")
    page.leave()
    page.drawn()
    box = page.box(f"{holder} canvas")
    left, top, right, bottom = (round(box[side]) for side in ("left", "top", "right", "bottom"))
    return imread(page.screenshot(path))[top:bottom, left:right, :3]


def patch_of(image: np.ndarray, row: int, column: int) -> np.ndarray:
    """The pixels of a patch on the screen."""
    height, width = image.shape[0] / ROWS, image.shape[1] / COLUMNS
    rows = slice(round(row * height), round((row + 1) * height))
    return image[rows, round(column * width) : round((column + 1) * width)]


def middle_of(patch: np.ndarray) -> np.ndarray:
    return patch[patch.shape[0] // 2, patch.shape[1] // 2]


@pytest.mark.parametrize(("scheme", "name"), [("light", "patches"), ("dark", "pixels")])
def test_painted_patches_stand_out_from_their_neighbours(opened, page, tmp_path, scheme, name):
    page.prefer(scheme)
    page, holder = opened()
    manner(page, name)
    image = seen(page, holder, tmp_path / "seen.png")
    for row, column in PLANTED:
        painted = middle_of(patch_of(image, row, column))
        for beside in ((row, column + 1), (row + 1, column), (row, column - 1)):
            bare = middle_of(patch_of(image, *beside))
            assert np.ptp(bare) < 0.01  # grey as the image is
            assert contrast(painted, bare) >= ENOUGH, (row, column, beside)
    more, less = (middle_of(patch_of(image, row, 1)) for row in (0, 2))
    assert more[2] > more[0] > more[1] and less[0] > less[1] > less[2]  # purple, and brown
    # and fainter by the slider
    page.focus("#over-image input")
    for keys, left in ((["ArrowLeft"] * 40, True), (["Home"], False)):
        page.keys(*keys)
        fainter = middle_of(patch_of(seen(page, holder, tmp_path / "seen.png"), 0, 1))
        assert luminance(more) > luminance(fainter)
        assert (np.abs(fainter - DARK).max() > 0.02) == left


def test_outlines_stand_out_and_leave_the_image_as_it_is(opened, page, tmp_path):
    page, holder = opened()
    manner(page, "outlines")
    image = seen(page, holder, tmp_path / "seen.png")

    def ends(row: int, column: int) -> np.ndarray:
        """Contrasts with the bare image, in the patch and at two of its edges."""
        patch, bare = (patch_of(image, row, c) for c in (column, column + 1))
        edges = patch, patch[: len(patch) // 4, patch.shape[1] // 2], patch[len(patch) // 2, :8]
        return np.array([contrast(edge, middle_of(bare)).max() for edge in edges])

    for (row, column), value in PLANTED.items():
        if value < 0:
            patch, bare = patch_of(image, row, column), patch_of(image, row, column + 1)
            assert np.abs(middle_of(patch) - middle_of(bare)).max() < 0.02
    # as few as hold half: two of the four, which are equal
    outlined = [found for found in starmap(ends, PLANTED) if found[0] >= ENOUGH]
    assert len(outlined) == 2 and np.min(outlined) >= ENOUGH
