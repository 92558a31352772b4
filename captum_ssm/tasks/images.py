"""Images with a label, and images whose pixels have labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .files import optional


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """An image and its class.

    Attributes:
        name: which file it is from.
        image: (3, H, W), uint8.
        label: the class.
    """

    name: str
    image: Tensor
    label: int


@dataclass(frozen=True, eq=False)
class SegmentedImage:
    """An image and the class of each of its pixels.

    Attributes:
        name: which file, or entry of a file, it is from.
        image: (3, H, W), uint8.
        labels: (H, W), int64.

    Raises:
        DataError: when the two are not of one height and width.
    """

    name: str
    image: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.image.shape[1:] != self.labels.shape:
            raise DataError(
                f"{self.name}: the image is of {tuple(self.image.shape[1:])} pixels, its labels of "
                f"{tuple(self.labels.shape)}. Height and width must be the same."
            )


def read_image(path: Path) -> Tensor:
    """An image file in RGB, (3, H, W), uint8."""
    return torch.from_numpy(_pixels(path, "RGB")).permute(2, 0, 1).contiguous()


def read_labels(path: Path) -> Tensor:
    """An image file whose pixels are labels, with or without a palette, (H, W), int64."""
    found = _pixels(path, None)
    if found.ndim != 2:
        raise DataError(
            f"{path} has {found.shape[-1]} channels; labels are one number per pixel, such as an "
            "index into a palette."
        )
    return torch.from_numpy(found).long()


def _pixels(path: Path, mode: str | None) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A copy of an image's numbers, in a mode of Pillow's or in its own."""
    pillow = optional("PIL.Image", "pillow", f"Reading {path}")
    try:
        with pillow.open(path) as opened:
            return np.array(opened if mode is None else opened.convert(mode))
    except OSError as error:
        raise DataError(f"{path} cannot be read as an image: {error}.") from None
