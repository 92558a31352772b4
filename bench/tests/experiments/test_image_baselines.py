"""What the package's methods are held against: each map against another way to make it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import GRID, MODELS, SIDE, scene_image
from captum.attr import InputXGradient, IntegratedGradients, Saliency

from captum_ssm.linear.norms import frozen_norms
from captum_ssm_bench import Cell
from captum_ssm_bench.experiments.image_baselines import (
    STEPS,
    brightness,
    captum_maps,
    contrast,
    picture_maps,
)

MAPS = {**captum_maps(), **picture_maps()}
ASKED = [4, 0, 4]


@pytest.fixture(params=["vim", "vit"])
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def logits_of(model: Any, image: Tensor) -> Tensor:
    found = model(image)
    return found if isinstance(found, Tensor) else found.logits


def patch_means(pixels: Tensor) -> Tensor:
    """(T, 16, 16) to (T, 4, 4), by loops."""
    out = torch.zeros(len(pixels), *GRID)
    for i in range(GRID[0]):
        for j in range(GRID[1]):
            out[:, i, j] = pixels[:, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].mean((1, 2))
    return out


def test_captums_methods(model: Any) -> None:
    for kind in (Saliency, InputXGradient, IntegratedGradients):
        check_captums_method(model, scene_image(), kind)


def check_captums_method(model: Any, image: Tensor, kind: Any) -> None:
    options = {"n_steps": STEPS} if kind is IntegratedGradients else {}
    wanted = []
    for target in ASKED:
        given = image.clone().requires_grad_()
        found = kind(lambda x: logits_of(model, x)).attribute(given, target=target, **options)
        wanted.append(found.sum(1)[0].detach())
    pixels = MAPS[Cell(kind.__name__, "pixels")](model, image, ASKED)
    assert relative_error(pixels, torch.stack(wanted)) <= 1e-5
    patches = MAPS[Cell(kind.__name__, "patches")](model, image, ASKED)
    assert relative_error(patches, patch_means(torch.stack(wanted))) <= 1e-5
    if kind is not Saliency:
        lengths = MAPS[Cell(kind.__name__, "patches, absolute")](model, image, ASKED)
        assert relative_error(lengths, patch_means(torch.stack(wanted).abs())) <= 1e-5


def test_norms_are_held_and_the_mean_colour_is_none(model: Any) -> None:
    """The gradient is that of the run whose norms keep their roots, along a small change."""
    image = scene_image().double()
    model, cell = model.double(), Cell("InputXGradient", "norms held, less the mean, patches")
    with torch.no_grad():
        whole = logits_of(model, image)[0]
        wanted = torch.zeros(len(ASKED), *GRID)
        for i in range(GRID[0]):
            for j in range(GRID[1]):
                change = torch.zeros_like(image)
                place = (0, slice(None), slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4))
                change[place] = (image - image.mean((2, 3), keepdim=True))[place]
                with frozen_norms(model, image):
                    changed = logits_of(model, image + 1e-6 * change)[0]
                wanted[:, i, j] = ((changed - whole) / 1e-6 / 16)[ASKED]
    found = MAPS[cell](model, image, ASKED)
    assert relative_error(found, wanted.to(found)) <= 1e-4


def test_ablation_gives_a_patch_the_mean_colour(model: Any) -> None:
    image = scene_image()
    wanted = torch.zeros(len(ASKED), *GRID)
    with torch.no_grad():
        whole = logits_of(model, image)[0]
        for i in range(GRID[0]):
            for j in range(GRID[1]):
                changed = image.clone()
                for colour in range(3):
                    place = changed[0, colour, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
                    place.fill_(float(image[0, colour].mean()))
                wanted[:, i, j] = (whole - logits_of(model, changed)[0])[ASKED]
    found = MAPS[Cell("FeatureAblation", "patches")](model, image, ASKED)
    # differences of logits, in single precision as exact as these are
    assert (found - wanted).abs().max() <= 1e-6 * whole.abs().max()


def test_contrast_is_the_distance_from_the_median() -> None:
    image = scene_image()
    ranked = image.flatten(2).sort(-1).values
    median = ranked[..., (SIDE**2 - 1) // 2]
    wanted = sum((image[0, c] - median[0, c]).abs() for c in range(3))
    assert torch.allclose(contrast(image)[0], wanted)
    assert torch.allclose(brightness(image)[0] * 3, image[0, 0] + image[0, 1] + image[0, 2])
