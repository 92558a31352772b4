"""The explained pixels of a dense prediction, from the user's choice."""

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

#: From this mean of its colors on, of 0 to 255, a pixel of a mask is light.
_LIGHT = 128


def over_pixels(
    loaded: Loaded,
    inputs: Any,
    mask: Path | None = None,
    pixel: Sequence[int] | None = None,
) -> Callable[..., Any]:
    """Return the function to explain: the model, or means over some pixels of a dense model.

    Args:
        loaded: the model.
        inputs: the model's inputs.
        mask: image file whose light pixels count, scaled to the model's output. Default: None,
            ``pixel`` counts.
        pixel: row and column of the only pixel that counts. Default: None, the pixels that the
            model assigns to the class.

    Raises:
        OptionError: when the model has one answer for an image, or mask or pixel do not fit.
        DataError: when the file is not an image.
    """
    if not loaded.is_dense:
        if mask is not None or pixel is not None:
            raise OptionError(
                "--target-mask and --target-pixel are for models that answer for every pixel of an "
                "image. Leave them out."
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
                f"--target-pixel {row} {column}: the model answers for {height} rows and {width} "
                "columns, numbered from 0."
            )
        chosen = torch.zeros(height, width, dtype=torch.bool)
        chosen[row, column] = True
        return mean_over(loaded.model, chosen)
    assert mask is not None
    return mean_over(loaded.model, _light(mask, (height, width)))


def _light(file: Path, size: tuple[int, int]) -> Tensor:
    """Return the light pixels of an image file, scaled to ``size``."""
    light = read_image(file).float().mean(0) >= _LIGHT
    found = F.interpolate(light[None, None].float(), size=size, mode="nearest")[0, 0].bool()
    if not bool(found.any()):
        raise OptionError(f"--target-mask {file} has no light pixels, at {size[0]} x {size[1]}.")
    return found
