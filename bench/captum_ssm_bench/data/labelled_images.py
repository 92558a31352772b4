"""Images with a label, and images whose pixels have labels.

Images with a label are read as ImageNet is laid out for training: one folder for each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from captum_ssm._files import Lazy, existing_folder
from captum_ssm.errors import DataError
from captum_ssm.models.image_files import SUFFIXES, read_image


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
        >>> from captum_ssm_bench.data import load_image_folders
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Path(root, "n01440764").mkdir()
        ...     Image.new("RGB", (4, 2)).save(Path(root, "n01440764", "tench.png"))
        ...     (example,) = load_image_folders(root)
        >>> example.label, tuple(example.image.shape)
        (0, (3, 2, 4))
    """
    top = existing_folder(root, "one folder of images for each class")
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
