"""Images and their relevance as PNG."""

from __future__ import annotations

import base64
import math
from io import BytesIO

import torch
from torch import Tensor

from ..errors import InputError
from ..viz.colours import scale

#: The share of the pixels with relevance that lie beyond the end of the colour scale, so that a few
#: extreme ones do not leave the others pale.
_BEYOND = 0.02
#: The grey of pixels that hold no number.
_NO_NUMBER = 128


def photograph(image: Tensor) -> str:
    """An image (C, H, W) or (1, C, H, W) as base64 of a PNG.

    Three channels are red, green and blue; the mean of any other number is shown in grey.  Integers
    run to 255, as do floats beyond 1 of which none is negative; floats that are negative somewhere
    are stretched from their smallest to their largest.
    """
    pixels = torch.nan_to_num(_as_image(image).double(), 0.0, 1.0, 0.0)
    low, high = _ends(pixels, image.dtype)
    pixels = (pixels - low) / ((high - low) or 1.0)
    if len(pixels) != 3:
        pixels = pixels.mean(0, keepdim=True).expand(3, -1, -1)
    return _png((pixels.clamp(0, 1) * 255).round().permute(1, 2, 0))


def heat(relevance: Tensor) -> str:
    """The relevance of an image, (C, H, W) or (1, C, H, W), summed over C, as base64 of a PNG.

    Colours are white at zero; pixels that are not a number are grey.
    """
    from matplotlib import colormaps

    summed = _as_image(relevance).double().sum(0)
    known = summed.isfinite()
    values = torch.where(known, summed, 0.0)
    end = _end_of_scale(values)
    colours, low, high = scale(values.clamp(-end, end))
    shares = (values.clamp(low, high) - low) / (high - low)
    pixels = torch.from_numpy(colormaps[colours](shares.numpy())[..., :3]) * 255
    return _png(torch.where(known[..., None], pixels.round(), _NO_NUMBER))


def _end_of_scale(values: Tensor) -> float:
    sizes = values[values != 0].abs().sort().values
    return float(sizes[math.ceil((1 - _BEYOND) * (len(sizes) - 1))]) if len(sizes) else 0.0


def _ends(pixels: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """What is shown as black and as white."""
    low, high = float(pixels.min()), float(pixels.max())
    if low < 0:
        return low, high
    in_bytes = high > 1 or not (dtype.is_floating_point or dtype == torch.bool)
    return 0.0, 255.0 if in_bytes else 1.0


def _as_image(image: Tensor) -> Tensor:
    pixels = image.detach().cpu()
    pixels = pixels[0] if pixels.dim() == 4 and len(pixels) == 1 else pixels
    if pixels.dim() != 3 or pixels.numel() == 0:
        raise InputError(
            f"a tensor of shape {tuple(image.shape)} cannot be shown as an image; an ImageFeature "
            "needs (1, C, H, W). Its visualization_transform may change the shape."
        )
    return pixels


def _png(pixels: Tensor) -> str:
    """(H, W, 3) of 0 to 255."""
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode("ascii")
