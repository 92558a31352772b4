"""Convert the relevance of image patches and pixels to rasters for the page."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attr.call.layout import PatchGrid, patch_sums, spread_over_image
from ..errors import CaptumSSMError
from ..tracing import find_mixers, find_model
from ..viz.html.pictures import Raster, raster


def rasters_of(maps: Tensor, grid: tuple[int, int] | None) -> dict[str, Raster]:
    """Return rasters ``"patches"`` and ``"pixels"`` of an image's relevance.

    Args:
        maps: relevance of patches (1, h, w) or of pixels (1, C, H, W). Other shapes have no
            rasters.
        grid: height and width of the grid of patches; None if the model has no patches.

    Example:
        >>> import torch
        >>> from captum_ssm.insights.rasters import rasters_of
        >>> {name: made[:3] for name, made in rasters_of(torch.ones(1, 3, 8, 8), (2, 4)).items()}
        {'patches': (2, 4, 24.0), 'pixels': (8, 8, 3.0)}
    """
    if maps.dim() == 3 and grid is not None:
        return {"patches": raster(maps[0], extremes=True)}
    if maps.dim() != 4:
        return {}
    patches = {} if grid is None else {"patches": raster(patch_sums(maps, grid)[0], extremes=True)}
    return patches | {"pixels": raster(maps[0].sum(0), extremes=False)}


def in_input_shape(relevance: Tensor, inputs: Tensor) -> Tensor:
    """Return relevance in the shape of the input; a patch's relevance is spread over its pixels."""
    scores_patches = inputs.dim() == 4 and relevance.dim() == 3
    return spread_over_image(relevance, inputs) if scores_patches else relevance


def patches_of(model: Any, inputs: tuple[Tensor, ...]) -> PatchGrid | None:
    """Return an object that finds the patch grid of an image, or None for other models."""
    if len(inputs) != 1 or inputs[0].dim() != 4:
        return None
    try:
        module = find_model(model)
        find_mixers(module)
    except CaptumSSMError:  # a model of another kind
        return None
    return PatchGrid(module)
