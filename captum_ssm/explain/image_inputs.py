"""Image files as models take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..models import VisionMamba, VMamba
from ..models.image_files import read_image

#: Mean and standard deviation of the colors of ImageNet, which the released models were trained
#: with, and the side of their images.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RELEASED = 224
#: The side of the scenes that a bundled VMamba was trained with.
_SCENE = 32
#: Images are resized to this multiple of the model's side, and their middle is cut out.
_MARGIN = 256 / 224
#: The most that an image's longer side may be of its shorter one.
_LONGEST = 100


def processed(processor: Any, files: Sequence[Path]) -> Tensor:
    """Return images (B, C, H, W) as a classifier of transformers takes them."""
    pictures = [_read(file).numpy() for file in files]
    found: Tensor = processor(images=pictures, return_tensors="pt")["pixel_values"]
    return found


def scene(file: Path, side: int) -> Tensor:
    """Return an image (3, S, S) as the bundled image classifiers take it, from -1 to 1."""
    image = _read(file)[None].float() / 255
    resized = F.interpolate(image, size=(side, side), mode="bilinear", antialias=True)[0]
    return 2 * resized - 1


def side_of(model: Any) -> int:
    """Return the side S of the square images that a bundled image classifier takes."""
    if isinstance(model, VMamba):  # it has no positions that would tell
        return _SCENE
    side: int = _size(model)[0] if isinstance(model, VisionMamba) else model.config.image_size
    return side


def for_vim(model: VisionMamba | VMamba, file: Path) -> Tensor:
    """Return an image (3, H, W) for the released models: resized, cropped, normalized."""
    projection: Any = next(m for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d))
    if projection.in_channels != 3:
        raise InputError(
            f"The model takes images of {projection.in_channels} color channels; files are read "
            "with three. Prepare the image in Python and use captum_ssm.report."
        )
    height, width = _size(model) if isinstance(model, VisionMamba) else (_RELEASED, _RELEASED)
    image = _read(file)[None].float() / 255  # (1, 3, h, w)
    scale = _MARGIN * max(height / image.shape[2], width / image.shape[3])
    size = [max(height, round(scale * image.shape[2])), max(width, round(scale * image.shape[3]))]
    resized = F.interpolate(image, size=size, mode="bicubic", antialias=True)[0].clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    middle = resized[:, top : top + height, left : left + width]
    mean, deviation = (torch.tensor(x)[:, None, None] for x in (_MEAN, _DEVIATION))
    return (middle - mean) / deviation


def _size(model: VisionMamba) -> tuple[int, int]:
    """Return height and width of the images whose patches a model has positions for."""
    projection = model.patch_embed.proj
    height, width = (
        (cells - 1) * stride + patch
        for cells, stride, patch in zip(
            model.grid, projection.stride, projection.kernel_size, strict=True
        )
    )
    return height, width


def _read(file: Path) -> Tensor:
    """Read an image (3, h, w), uint8; refuse extreme ratios of the sides."""
    image = read_image(file)
    height, width = image.shape[1:]
    if max(height, width) > _LONGEST * min(height, width):
        raise InputError(
            f"{file} is of {width} x {height} pixels: one side is more than {_LONGEST} times the "
            "other, so that little of it would be seen. Crop it."
        )
    return image
