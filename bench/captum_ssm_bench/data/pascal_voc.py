"""Pascal VOC's segmentation: images and masks of 20 classes and the background."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from captum_ssm._files import Lazy, existing_file, existing_folder, read_lines
from captum_ssm.errors import DataError
from captum_ssm.models.image_files import read_image, read_labels

from .labelled_images import SegmentedImage

#: The label of outlines and of what is too hard to tell.
VOC_IGNORED = 255

#: The classes in the order of their labels.
VOC_CLASSES = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)


def load_pascal_voc(
    root: str | Path, split: str = "val", *, masks: str = "SegmentationClass"
) -> Lazy[str, SegmentedImage]:
    """The images of a split, with labels 0 to 20, and 255 for pixels that do not count.

    Args:
        root: the folder ``VOC2012``, which holds ``JPEGImages`` and ``ImageSets``.
        split: a list in ``ImageSets/Segmentation``. Default: ``"val"``.
        masks: the folder of the masks; the augmented set has one of its own. Default:
            ``"SegmentationClass"``.

    Returns:
        The images in the list's order, read with Pillow when they are asked for.

    Raises:
        DataNotFoundError: when a folder or the list is missing; and, when it is asked for, an image
            or mask that is.
        DataError: when the list is empty, or names an image in another folder; and, when it is
            asked for, a mask with other labels.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from captum_ssm_bench.data import VOC_CLASSES, load_pascal_voc
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        ...         Path(root, name).mkdir(parents=True)
        ...     Image.new("RGB", (4, 2)).save(Path(root, "JPEGImages", "a.jpg"))
        ...     Image.new("L", (4, 2), color=12).save(Path(root, "SegmentationClass", "a.png"))
        ...     _ = Path(root, "ImageSets", "Segmentation", "val.txt").write_text("a")
        ...     (example,) = load_pascal_voc(root)
        >>> tuple(example.labels.shape), [VOC_CLASSES[label] for label in example.labels.unique()]
        ((2, 4), ['dog'])
    """
    top = existing_folder(root, "JPEGImages and ImageSets of Pascal VOC")
    existing_folder(top / "JPEGImages", "the images; root is the folder VOC2012")
    existing_folder(top / masks, "the masks")
    listed = existing_file(
        top / "ImageSets" / "Segmentation" / f"{split}.txt", "a split that is listed there"
    )
    names = [line.strip() for line in read_lines(listed) if line.strip()]
    if not names:
        raise DataError(f"{listed} names no image.")
    for name in names:
        if Path(name).name != name:
            raise DataError(f"{listed} names {name!r}, which would lie outside of JPEGImages.")
    return Lazy(names, partial(_read, top, masks))


def _read(top: Path, masks: str, name: str) -> SegmentedImage:
    image = existing_file(
        top / "JPEGImages" / f"{name}.jpg", "a root that holds the images of the split"
    )
    mask = existing_file(top / masks / f"{name}.png", "a folder that holds the masks of the split")
    labels = read_labels(mask)
    wrong = labels[(labels >= len(VOC_CLASSES)) & (labels != VOC_IGNORED)]
    if len(wrong):
        raise DataError(
            f"{mask} has labels {torch.unique(wrong).tolist()[:9]}; 0 to {len(VOC_CLASSES) - 1} "
            f"and {VOC_IGNORED} are needed."
        )
    return SegmentedImage(str(image), read_image(image), labels)
