"""Encode images, and relevance of images, for pages."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ..figure import color_scale

#: The share of pixels beyond the end of the color scale, so a few extremes do not make the others
#: pale.
_CLIPPED_SHARE = 0.02
#: The gray level of pixels without a relevance value.
_NAN_GRAY = 128 / 255
#: Levels from zero to the largest relevance, and the code for NaN.
_STEPS, _NAN_STEP = 127, -128


class Raster(NamedTuple):
    """Relevance of an image by rows and columns, in few bytes.

    Attributes:
        rows, columns: the numbers of rows and columns of patches or pixels.
        largest: the end of the scale.
        steps: the values in 127ths of ``largest``, row by row, int8 in base64; NaN is -128.
    """

    rows: int
    columns: int
    largest: float
    steps: str


def raster(values: Tensor, *, extremes: bool) -> Raster:
    """Round relevance (h, w) to 127 levels; ``extremes=False`` clips the largest values."""
    values = values.detach().cpu().double()
    is_finite = values.isfinite()
    finite = torch.where(is_finite, values, 0.0)
    end = float(finite.abs().max()) if extremes else _end_of_scale(finite)
    steps = (finite.clamp(-end, end) / (end or 1.0) * _STEPS).round()
    steps = torch.where(is_finite, steps, float(_NAN_STEP)).to(torch.int8)
    text = base64.b64encode(steps.contiguous().numpy().tobytes()).decode("ascii")
    rows, columns = values.shape
    return Raster(rows, columns, end, text)


def png(picture: Tensor) -> bytes:
    """Encode an image (H, W, 3) in [0, 1] as a PNG file of 8 bits per channel."""
    height, width, _ = picture.shape
    rows = (picture * 255).round().clamp(0, 255).to(torch.uint8).flatten(1)  # (H, 3 W)
    rows[1:] -= rows[:-1].clone()  # filter 2: the difference from the row above, modulo 256
    filtered = torch.cat([torch.full_like(rows[:, :1], 2), rows], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    pixels = zlib.compress(filtered.contiguous().numpy().tobytes(), 9)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def in_base64(picture: Tensor) -> str:
    """Return an image (H, W, 3) in [0, 1] as base64 of a PNG file."""
    return base64.b64encode(png(picture)).decode("ascii")


def photograph(image: Tensor) -> str:
    """Encode an image (C, H, W) or (1, C, H, W) as base64 of a PNG.

    Three channels are red, green and blue; the mean of any other number is gray. White is 255 for
    integers and for nonnegative floats with values above 1, else 1. Floats with negative values
    are stretched from their smallest to their largest.
    """
    pixels = torch.nan_to_num(_as_image(image).double(), 0.0, 1.0, 0.0)
    black, white = _black_and_white(pixels, image.dtype)
    pixels = (pixels - black) / ((white - black) or 1.0)
    if len(pixels) != 3:
        pixels = pixels.mean(0, keepdim=True).expand(3, -1, -1)
    return in_base64(pixels.permute(1, 2, 0))


def heat(relevance: Tensor) -> str:
    """Encode an image's relevance (C, H, W) or (1, C, H, W), summed over C, as base64 of a PNG.

    Zero is white; pixels that are not a number are gray.
    """
    from matplotlib import colormaps

    summed = _as_image(relevance).double().sum(0)
    is_finite = summed.isfinite()
    values = torch.where(is_finite, summed, 0.0)
    largest = _end_of_scale(values)
    color_map, low, high = color_scale(values.clamp(-largest, largest))
    shares = (values.clamp(low, high) - low) / (high - low)
    pixels = torch.from_numpy(colormaps[color_map](shares.numpy())[..., :3])
    return in_base64(torch.where(is_finite[..., None], pixels, _NAN_GRAY))


def _end_of_scale(values: Tensor) -> float:
    """Return the absolute value that 2 % of the nonzero values exceed; 0 if all are zero."""
    sizes = values[values != 0].abs().sort().values
    return float(sizes[math.ceil((1 - _CLIPPED_SHARE) * (len(sizes) - 1))]) if len(sizes) else 0.0


def _black_and_white(pixels: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the pixel values that :func:`photograph` shows as black and as white."""
    low, high = float(pixels.min()), float(pixels.max())
    if low < 0:
        return low, high
    is_byte_scale = high > 1 or not (dtype.is_floating_point or dtype == torch.bool)
    return 0.0, 255.0 if is_byte_scale else 1.0


def _as_image(image: Tensor) -> Tensor:
    """Return one image as (C, H, W) on the CPU; raise InputError for other shapes."""
    pixels = image.detach().cpu()
    pixels = pixels[0] if pixels.dim() == 4 and len(pixels) == 1 else pixels
    if pixels.dim() != 3 or pixels.numel() == 0:
        raise InputError(
            f"A tensor of shape {tuple(image.shape)} cannot be shown as an image. Pass (1, C, H, "
            "W) to an ImageFeature, or convert the shape in its visualization_transform."
        )
    return pixels


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file: its length, kind, data and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
