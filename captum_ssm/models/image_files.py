"""Images with a label, and images whose pixels have labels.

ImageNet as it is laid out for training: one folder of images for each class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._files import Lazy, folder, optional
from ..errors import DataError

#: The most pixels of an image: more than any camera's, and 0.8 GB in RGB.
_MOST_PIXELS = 2**28


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


def check_pixels(name: str, size: Sequence[int]) -> None:
    """Raise if an image is too large to be one, before memory is taken for it.

    Args:
        name: of the image, for the error.
        size: width and height, in any order, as its file declares them.

    Raises:
        DataError: when it has more pixels than are read.
    """
    if math.prod(size) > _MOST_PIXELS:
        raise DataError(
            f"{name} declares {' x '.join(map(str, size))} pixels; at most {_MOST_PIXELS} are "
            "read. Is the file damaged? If not, scale the image down."
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
            check_pixels(str(path), opened.size)
            return np.array(opened if mode is None else opened.convert(mode))
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}.") from None


#: What an image's name may end in, in any case.
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")


def load_image_folders(
    root: str | Path, classes: Sequence[str] | None = None
) -> Lazy[tuple[Path, int], LabelledImage]:
    """Images in folders that are named after their classes, such as ``val/n01440764/x.JPEG``.

    Args:
        root: holds the folders. Other files, and folders within the folders, are not looked at.
        classes: the folders' names in the order of the model's classes, of which those that do not
            exist have no images. Default: None, all folders in alphabetical order, which for
            ImageNet's synsets is the usual one.

    Returns:
        Images by class, and by name within a class; read with Pillow when they are asked for.

    Raises:
        DataNotFoundError: when ``root`` is not a folder.
        DataError: when it holds a folder that ``classes`` does not name, or no image; and, when it
            is asked for, an image that cannot be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from captum_ssm.bench.tasks import load_image_folders
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Path(root, "n01440764").mkdir()
        ...     Image.new("RGB", (4, 2)).save(Path(root, "n01440764", "tench.png"))
        ...     (example,) = load_image_folders(root)
        >>> example.label, tuple(example.image.shape)
        (0, (3, 2, 4))
    """
    top = folder(root, "one folder of images for each class")
    found = sorted(path.name for path in top.iterdir() if path.is_dir())
    names = found if classes is None else list(classes)
    if unknown := sorted(set(found) - set(names)):
        raise DataError(f"{top} holds the folders {unknown[:9]}, which classes does not name.")
    labels = {name: label for label, name in enumerate(names)}
    keys = [
        (path, labels[name])
        for name in names
        if name in set(found)
        for path in sorted((top / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    if not keys:
        raise DataError(f"{top} holds no folder with images ({', '.join(SUFFIXES)}).")
    return Lazy(keys, _read)


def _read(key: tuple[Path, int]) -> LabelledImage:
    path, label = key
    return LabelledImage(str(path), read_image(path), label)
