"""Read image files with Pillow as tensors of pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._optional import optional
from ..errors import DataError

#: Accepted suffixes of image files, in lower or upper case.
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
#: The most pixels of an image: more than any camera's, and 0.8 GB in RGB.
_MOST_PIXELS = 2**28


def check_pixels(name: str, size: Sequence[int]) -> None:
    """Raise if an image has too many pixels, before memory is allocated for the image.

    Args:
        name: name of the image in errors.
        size: width and height that the image file declares, in any order.
    """
    if math.prod(size) > _MOST_PIXELS:
        raise DataError(
            f"{name} declares {' x '.join(map(str, size))} pixels; at most {_MOST_PIXELS} are "
            "accepted. Scale the image down, or replace the file if it is damaged."
        )


def read_image(path: Path) -> Tensor:
    """Read an image file as RGB; return a tensor (3, H, W) of dtype uint8."""
    pillow = optional("PIL.Image", "pillow", f"Reading {path}")
    try:
        with pillow.open(path) as image:
            check_pixels(str(path), image.size)
            pixels = np.array(image.convert("RGB"))
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}. Pass a complete PNG or JPEG file."
        ) from None
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
