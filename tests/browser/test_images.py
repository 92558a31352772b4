"""Relevance over images, in the report and in Insights: it is seen on dark and bright objects."""

from __future__ import annotations

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
    """Finds the same relevance in every image, in a few patches."""

    get_name = classmethod(lambda cls: "Planted")

    def attribute(
        self, inputs: Any, target: Any = None, additional_forward_args: Any = None
    ) -> Tensor:
        found = torch.zeros_like(scene())
        for (row, column), value in PLANTED.items():
            rows = slice(row * PATCH[0], (row + 1) * PATCH[0])
            found[..., rows, column * PATCH[1] : (column + 1) * PATCH[1]] = value
        return found


def luminance(colours: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB (..., 3) in 0 to 1 (WCAG 2.2)."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrast(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dark, bright = np.sort(np.stack(np.broadcast_arrays(luminance(a), luminance(b))), axis=0)
    return (bright + 0.05) / (dark + 0.05)


def seen(page: Page, holder: str, path: Path) -> np.ndarray:
    """The colours in the middle of each patch, (ROWS, COLUMNS, 3) in 0 to 1."""
    page.scroll_to(f"{holder} canvas")
    page.leave()
    page.drawn()
    box = page.box(f"{holder} canvas")
    left, top, right, bottom = (round(box[side]) for side in ("left", "top", "right", "bottom"))
    image = imread(page.screenshot(path))[top:bottom, left:right, :3]
    across, down = ((np.arange(n) + 0.5) / n for n in (COLUMNS, ROWS))
    middles = (down * image.shape[0]).astype(int)[:, None], (across * image.shape[1]).astype(int)
    return image[middles]


@pytest.mark.parametrize("holder", ["#picture", ".stack"])
@pytest.mark.parametrize(("scheme", "name"), [("light", "patches"), ("dark", "pixels")])
def test_painted_patches_stand_out_from_their_neighbours(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, name: str, holder: str
) -> None:
    """In a report and in Insights, whichever way relevance lies over the image."""
    model = vision("middle", (ROWS, COLUMNS))
    monkeypatch.setitem(ATTRIBUTION_NAMES_TO_METHODS, "Planted", Planted)
    feature, names = ImageFeature("photo", None, None), [f"class {i}" for i in range(CLASSES)]
    visualizer = AttributionVisualizer(model, names, feature, [Batch(scene(), None)])
    visualizer.config = FilterConfig("Planted")
    page.prefer(scheme)
    with visualizer:
        if holder == "#picture":
            page.goto(report(model, scene(), [Planted, LatimFlow], path=tmp_path / "scene.html"))
        else:
            visualizer.serve()
            page.goto(visualizer.url)
            page.wait_for("document.querySelectorAll('.stack canvas').length === 1")
        page.choose("#over-image select", name)
        image = seen(page, holder, tmp_path / "seen.png")
        for row, column in PLANTED:
            for beside in ((row, column + 1), (row + 1, column), (row, column - 1)):
                assert np.ptp(image[beside]) < 0.01  # grey as the image is
                assert contrast(image[row, column], image[beside]) >= ENOUGH
        more, less = image[0, 1], image[2, 1]
        assert more[2] > more[0] > more[1] and less[0] > less[1] > less[2]  # purple, and brown
        page.focus("#over-image input")
        page.keys("Home")  # by the slider there is nothing of it
        assert np.abs(seen(page, holder, tmp_path / "seen.png")[0, 1] - DARK).max() < 0.02
    assert page.errors == [] and page.dialogs == []
    assert all(url.startswith(("file:", "http://127.0.0.1:")) for url in page.requests)
