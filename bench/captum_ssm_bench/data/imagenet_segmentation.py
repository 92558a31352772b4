"""ImageNet-Segmentation (Guillaumin et al. 2014): 4,276 images with the object's outline.

The file ``gtsegs_ijcv.mat`` is MATLAB's of version 7.3, which is HDF5.  MATLAB stores columns
first, so that arrays come transposed: an image as (3, W, H), a mask as (W, H).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm._files import Lazy, existing_file
from captum_ssm._optional import optional
from captum_ssm.errors import DataError
from captum_ssm.models.image_files import check_pixels


@dataclass(frozen=True, eq=False)
class SegmentedImage:
    """An image and the class of each of its pixels.

    Attributes:
        name: which entry of a file it is from.
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


def load_imagenet_segmentation(path: str | Path) -> Lazy[int, SegmentedImage]:
    """The images and masks of ``gtsegs_ijcv.mat``; labels are 1 for the object and 0 around it.

    Args:
        path: the file; it is opened anew for each image, so that the result may be handed to other
            processes.

    Returns:
        The images in the file's order, read with h5py when they are asked for.

    Raises:
        DataNotFoundError: when there is no such file.
        DataError: when it is not ImageNet-Segmentation's; and, when it is asked for, an image or
            mask that is not as it should be.
        ImportError: when h5py is not installed.

    Example:
        >>> import tempfile, h5py, numpy
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_imagenet_segmentation
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with h5py.File(Path(folder, "gtsegs_ijcv.mat"), "w") as data:
        ...         data["image"], data["mask"] = numpy.zeros((3, 4, 2)), numpy.eye(4, 2)
        ...         for at, of in (("cell", "mask"), ("value/img", "image"), ("value/gt", "cell")):
        ...             data[at] = numpy.array([[data[of].ref]], h5py.ref_dtype)
        ...     (example,) = load_imagenet_segmentation(Path(folder, "gtsegs_ijcv.mat"))
        >>> tuple(example.image.shape), example.labels.tolist()
        ((3, 2, 4), [[1, 0, 0, 0], [0, 1, 0, 0]])
    """
    found = existing_file(path, "ImageNet-Segmentation's gtsegs_ijcv.mat")
    with _opened(found) as data:
        counts = [len(_entry(found, data, name)) for name in ("/value/img", "/value/gt")]
    if counts[0] != counts[1]:
        raise DataError(f"{found} holds {counts[0]} images, but {counts[1]} masks.")
    return Lazy(range(counts[0]), partial(_read, found))


def _read(path: Path, index: int) -> SegmentedImage:
    with _opened(path) as data:
        images, masks = _entry(path, data, "/value/img"), _entry(path, data, "/value/gt")
        try:
            image = _array(path, index, data[images[index, 0]])
            mask = _array(path, index, data[data[masks[index, 0]][0, 0]])
        except DataError:
            raise
        except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
            raise DataError(f"{path}, image {index} points at nothing: {error}.") from None
    if image.ndim == 2:
        image = np.stack([image] * 3)
    if image.ndim != 3 or len(image) != 3 or mask.ndim != 2:
        raise DataError(
            f"{path}, image {index} has shape {image.shape} and its mask {mask.shape}; (3, W, H) "
            "and (W, H) are needed."
        )
    labels = torch.from_numpy(mask.T.astype(np.int64))
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise DataError(
            f"{path}, image {index} has labels {torch.unique(labels).tolist()[:9]}; 0 and 1 are "
            "needed."
        )
    pixels = torch.from_numpy(np.ascontiguousarray(image.astype(np.uint8).transpose(0, 2, 1)))
    return SegmentedImage(f"{path}, image {index}", pixels, labels)


def _array(path: Path, index: int, found: Any) -> Any:
    """A dataset's numbers, unless it declares more of them than an image has."""
    check_pixels(f"{path}, image {index}", found.shape[-2:])
    if found.ndim > 3 or (found.ndim == 3 and len(found) != 3):
        raise DataError(f"{path}, image {index} has shape {found.shape}; (3, W, H) is needed.")
    return np.asarray(found)


def _opened(path: Path) -> Any:
    h5py = optional("h5py", "h5py", f"Reading {path}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} is not an HDF5 file (MATLAB 7.3): {error}.") from None


def _entry(path: Path, data: Any, name: str) -> Any:
    if name not in data:
        raise DataError(f"{path} has no {name}, so it is not ImageNet-Segmentation's file.")
    return data[name]
