"""Select the pixels of a segmentation model's output that are explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attr.call.dense import mean_over
from ..attr.call.targets import logits_of
from ..errors import OptionError
from ..models.image_files import read_image

if TYPE_CHECKING:
    from .loading import Loaded

#: A mask pixel is light if the mean of its colors (0 to 255) is at least this value.
_LIGHT = 128


def explained_function(
    loaded: Loaded, inputs: Any, mask: Path | None = None, pixel: Sequence[int] | None = None
) -> Callable[..., Any]:
    """Return the model; for a segmentation model, a function of its mean logits over some pixels.

    Args:
        loaded: the loaded model.
        inputs: the model's inputs.
        mask: an image file, scaled to the model's output; select its light pixels. Default: None,
            use ``pixel``.
        pixel: row and column of the only selected pixel. Default: None, select the pixels that the
            model assigns to the class.

    Raises:
        OptionError: if mask or pixel is passed for a different kind of model, or does not fit.
        DataError: if the file is not an image.
    """
    if not loaded.is_dense:
        if mask is not None or pixel is not None:
            raise OptionError(
                "--target-mask and --target-pixel need a segmentation model, but this model "
                "returns one prediction per image. Leave these options out."
            )
        return loaded.model
    if mask is None and pixel is None:
        return mean_over(loaded.model)
    with torch.no_grad():
        height, width = logits_of(loaded.model(inputs[:1])).shape[2:]
    if pixel is not None:
        row, column = pixel
        if not (0 <= row < height and 0 <= column < width):
            raise OptionError(
                f"--target-pixel {row} {column} is outside the model's output. Pass a row from 0 "
                f"to {height - 1} and a column from 0 to {width - 1}."
            )
        selected = torch.zeros(height, width, dtype=torch.bool)
        selected[row, column] = True
        return mean_over(loaded.model, selected)
    assert mask is not None
    return mean_over(loaded.model, _light_pixels(mask, (height, width)))


def _light_pixels(file: Path, size: tuple[int, int]) -> Tensor:
    """Return a boolean mask of the light pixels of an image file, scaled to ``size``."""
    light = read_image(file).float().mean(0) >= _LIGHT
    resized = F.interpolate(light[None, None].float(), size=size, mode="nearest")[0, 0].bool()
    if not bool(resized.any()):
        raise OptionError(
            f"--target-mask {file} has no light pixels after resizing to {size}. Pass an image "
            "with a white area."
        )
    return resized
