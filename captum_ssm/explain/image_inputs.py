"""Convert image files to the inputs of models."""

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

#: Mean and standard deviation of colors in ImageNet, on which the released models were trained.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Side length in pixels of the released models' images.
_RELEASED = 224
#: Side length in pixels of the images with which a bundled VMamba was trained.
_SCENE = 32
#: Images are resized to this multiple of the model's image size before a center crop.
_MARGIN = 256 / 224
#: Largest accepted ratio of an image's sides.
_LONGEST = 100


def processed(processor: Any, files: Sequence[Path]) -> Tensor:
    """Read image files and convert them to (B, C, H, W) with a transformers image processor."""
    pictures = [_read_image(file).numpy() for file in files]
    pixels: Tensor = processor(images=pictures, return_tensors="pt")["pixel_values"]
    return pixels


def read_small_image(file: Path, side: int) -> Tensor:
    """Read an image file, resized to (3, side, side) and scaled to -1 to 1, for small models."""
    image = _read_image(file)[None].float() / 255
    resized = F.interpolate(image, size=(side, side), mode="bilinear", antialias=True)[0]
    return 2 * resized - 1


def image_side_of(model: Any) -> int:
    """Return the side of the square images that a classifier of this package was trained on."""
    if isinstance(model, VMamba):  # without position embeddings, the size is not in the weights
        return _SCENE
    side: int = _image_size(model)[0] if isinstance(model, VisionMamba) else model.config.image_size
    return side


def read_vim(model: VisionMamba | VMamba, file: Path) -> Tensor:
    """Read an image file, and resize, crop and normalize it to (3, H, W) for released models."""
    projection: Any = next(m for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d))
    if projection.in_channels != 3:
        raise InputError(
            f"The model needs images with {projection.in_channels} color channels, but {file} is "
            "read with 3. Prepare the image in Python, and use captum_ssm.report."
        )
    height, width = _image_size(model) if isinstance(model, VisionMamba) else (_RELEASED, _RELEASED)
    image = _read_image(file)[None].float() / 255  # (1, 3, h, w)
    scale = _MARGIN * max(height / image.shape[2], width / image.shape[3])
    size = [max(height, round(scale * image.shape[2])), max(width, round(scale * image.shape[3]))]
    resized = F.interpolate(image, size=size, mode="bicubic", antialias=True)[0].clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    cropped = resized[:, top : top + height, left : left + width]
    mean, deviation = (torch.tensor(x)[:, None, None] for x in (_MEAN, _DEVIATION))
    return (cropped - mean) / deviation


def _image_size(model: VisionMamba) -> tuple[int, int]:
    """Return height and width of images that fit the model's position embeddings."""
    projection = model.patch_embed.proj
    height, width = (
        (count - 1) * stride + patch
        for count, stride, patch in zip(
            model.grid, projection.stride, projection.kernel_size, strict=True
        )
    )
    return height, width


def _read_image(file: Path) -> Tensor:
    """Read an image file as uint8 (3, h, w); raise if one side is extremely long."""
    image = read_image(file)
    height, width = image.shape[1:]
    if max(height, width) > _LONGEST * min(height, width):
        raise InputError(
            f"{file} has {width} x {height} pixels: one side is more than {_LONGEST} times as long "
            "as the other, so most of the image would be cut off. Crop the image."
        )
    return image
