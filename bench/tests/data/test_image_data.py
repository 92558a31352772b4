"""Loaders of images and masks, on small stand-ins laid out as the real sets are."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from captum_ssm.errors import CaptumSSMError, DataError, DataNotFoundError
from captum_ssm_bench.data import (
    VOC_CLASSES,
    VOC_IGNORED,
    LabelledImage,
    SegmentedImage,
    load_image_folders,
    load_imagenet_segmentation,
    load_pascal_voc,
)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.randint(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def pillow():
    return pytest.importorskip("PIL.Image")


# --- folders of images ---------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path, pillow):
    """Two synsets, three images, of which one is grey, and files that are none."""
    shown = {}
    for name in ("n02/b.png", "n02/a.PNG", "n01/z.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        shown[name] = noise(4, 7)
        pillow.fromarray(shown[name]).save(path, "PNG")
    grey = shown["n01/z.png"][..., 0]
    pillow.fromarray(grey).save(tmp_path / "n01" / "z.png")
    shown["n01/z.png"] = np.stack([grey] * 3, -1)
    (tmp_path / "readme.txt").write_text("not a class")
    (tmp_path / "n02" / "notes.txt").write_text("not an image")
    return tmp_path, shown


def test_image_folders(folders):
    root, shown = folders
    found = load_image_folders(root)
    names = ["n01/z.png", "n02/a.PNG", "n02/b.png"]
    assert [Path(x.name).relative_to(root).as_posix() for x in found] == names
    assert [x.label for x in found] == [0, 1, 1]
    for example, name in zip(found, names, strict=True):
        assert isinstance(example, LabelledImage) and example.image.dtype == torch.uint8
        assert torch.equal(example.image, torch.from_numpy(shown[name]).permute(2, 0, 1))
    assert [x.label for x in found[1:]] == [1, 1] and len(found[:-1]) == 2
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(again[-1].image, found[2].image)
    with pytest.raises(IndexError):
        found[3]


def test_classes_in_an_order_of_their_own(folders):
    root, _ = folders
    found = load_image_folders(root, ["n02", "n00", "n01"])
    assert [x.label for x in found] == [0, 0, 2]
    with pytest.raises(DataError, match=r"n01.*classes does not name"):
        load_image_folders(root, ["n02"])


def test_broken_image_folders(tmp_path, folders):
    root, _ = folders
    (root / "n02" / "a.PNG").write_bytes(b"no image at all")
    with pytest.raises(DataError, match=r"a\.PNG cannot be read as an image"):
        load_image_folders(root)[1]
    missing = root / "nowhere"
    with pytest.raises(DataNotFoundError, match="nowhere does not exist") as caught:
        load_image_folders(missing)
    assert isinstance(caught.value, CaptumSSMError | FileNotFoundError)
    with pytest.raises(DataNotFoundError, match="is not a folder"):
        load_image_folders(root / "readme.txt")
    (tmp_path / "empty" / "n01").mkdir(parents=True)
    with pytest.raises(DataError, match="no folder with images"):
        load_image_folders(tmp_path / "empty")


# --- ImageNet-Segmentation -----------------------------------------------------------------------


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py")


def write_mat(h5py, path: Path, images: list[np.ndarray], masks: list[np.ndarray]) -> None:
    """What MATLAB 7.3 writes: cells hold references, arrays have their axes reversed."""
    with h5py.File(path, "w") as data:
        kept = data.create_group("#refs#")

        def refer(name: str, array: np.ndarray):
            return kept.create_dataset(name, data=array).ref

        def cells(name: str, references: list) -> None:
            data.create_dataset(
                name, data=np.array(references, dtype=object)[:, None], dtype=h5py.ref_dtype
            )

        cells("/value/img", [refer(f"i{n}", image.T) for n, image in enumerate(images)])
        inner = []
        for n, mask in enumerate(masks):
            of_mask = np.array([[refer(f"m{n}", mask.T)]], dtype=object)
            inner.append(kept.create_dataset(f"c{n}", data=of_mask, dtype=h5py.ref_dtype).ref)
        cells("/value/gt", inner)


def test_imagenet_segmentation(tmp_path, h5py):
    images = [noise(4, 7), noise(9, 3), noise(5, 5)]
    masks = [np.random.randint(0, 2, image.shape[:2], dtype=np.uint8) for image in images]
    images[2] = images[2][..., 0]  # some are grey
    write_mat(h5py, tmp_path / "gt.mat", images, masks)
    found = load_imagenet_segmentation(tmp_path / "gt.mat")
    assert len(found) == 3
    for example, image, mask in zip(found, images, masks, strict=True):
        assert isinstance(example, SegmentedImage)
        colour = image if image.ndim == 3 else np.stack([image] * 3, -1)
        assert torch.equal(example.image, torch.from_numpy(colour).permute(2, 0, 1))
        assert torch.equal(example.labels, torch.from_numpy(mask).long())
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(again[-1].labels, found[2].labels)


def test_broken_imagenet_segmentation(tmp_path, h5py):
    path = tmp_path / "gt.mat"
    image, mask = noise(4, 7), np.ones((4, 7), np.uint8)

    def read(images, masks):
        write_mat(h5py, path, images, masks)
        return load_imagenet_segmentation(path)[0]

    with pytest.raises(DataError, match=r"gt\.mat.*1 images, but 2 masks"):
        read([image], [mask, mask])
    with pytest.raises(DataError, match=r"image 0.*Height and width"):
        read([image], [mask[1:]])
    with pytest.raises(DataError, match=r"image 0 has labels \[2\]"):
        read([image], [mask + 1])
    with pytest.raises(DataError, match=r"image 0 has shape \(4, 7, 4\)"):
        read([np.zeros((4, 7, 4), np.uint8)], [mask])
    with h5py.File(path, "w") as data:
        data["/value/img"] = np.zeros((1, 1))
    with pytest.raises(DataError, match="/value/gt"):
        load_imagenet_segmentation(path)
    with h5py.File(path, "a") as data:
        data["/value/gt"] = np.zeros((1, 1))
    with pytest.raises(DataError, match="image 0 points at nothing"):
        load_imagenet_segmentation(path)[0]
    path.write_text("a text")
    with pytest.raises(DataError, match="not an HDF5 file"):
        load_imagenet_segmentation(path)
    with pytest.raises(DataNotFoundError, match=r"no\.mat does not exist.*gtsegs_ijcv"):
        load_imagenet_segmentation(tmp_path / "no.mat")


def test_without_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    (tmp_path / "gt.mat").write_text("")
    with pytest.raises(ImportError, match=r"gt\.mat needs h5py: pip install h5py"):
        load_imagenet_segmentation(tmp_path / "gt.mat")


# --- Pascal VOC ----------------------------------------------------------------------------------


@pytest.fixture
def voc(tmp_path, pillow):
    """Two images with masks that have a palette, as VOC's do."""
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / name).mkdir(parents=True)
    labels = {}
    for name in ("2007_001", "2007_000"):
        pillow.fromarray(noise(6, 8)).save(tmp_path / "JPEGImages" / f"{name}.jpg")
        labels[name] = np.random.choice([0, 5, 20, 255], (6, 8)).astype(np.uint8)
        mask = pillow.fromarray(labels[name])
        mask.putpalette(np.random.randint(0, 256, 768, dtype=np.uint8).tobytes())
        assert mask.mode == "P"
        mask.save(tmp_path / "SegmentationClass" / f"{name}.png")
    listed = tmp_path / "ImageSets" / "Segmentation" / "val.txt"
    listed.write_text("2007_001\n2007_000\n\n")
    return tmp_path, labels


def test_pascal_voc(voc, pillow):
    root, labels = voc
    found = load_pascal_voc(root)
    assert len(found) == 2
    for example, (name, mask) in zip(found, labels.items(), strict=True):
        assert name in example.name
        assert torch.equal(example.labels, torch.from_numpy(mask).long())
        with pillow.open(root / "JPEGImages" / f"{name}.jpg") as image:
            assert torch.equal(example.image, torch.from_numpy(np.array(image)).permute(2, 0, 1))
    assert (len(VOC_CLASSES), VOC_CLASSES[15], VOC_IGNORED) == (21, "person", 255)


def test_broken_pascal_voc(voc, pillow):
    root, _ = voc
    masks = root / "SegmentationClass"
    pillow.fromarray(noise(6, 8)).save(masks / "2007_001.png")
    with pytest.raises(DataError, match=r"2007_001\.png has 3 channels"):
        load_pascal_voc(root)[0]
    pillow.fromarray(np.full((6, 8), 21, np.uint8)).save(masks / "2007_001.png")
    with pytest.raises(DataError, match=r"labels \[21\]"):
        load_pascal_voc(root)[0]
    pillow.fromarray(np.zeros((8, 6), np.uint8)).save(masks / "2007_001.png")
    with pytest.raises(DataError, match="Height and width"):
        load_pascal_voc(root)[0]
    (masks / "2007_000.png").unlink()
    with pytest.raises(DataNotFoundError, match=r"2007_000\.png does not exist"):
        load_pascal_voc(root)[1]
    with pytest.raises(DataNotFoundError, match=r"train\.txt does not exist"):
        load_pascal_voc(root, "train")
    with pytest.raises(DataNotFoundError, match="Aug does not exist"):
        load_pascal_voc(root, masks="SegmentationClassAug")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("\n")
    with pytest.raises(DataError, match="names no image"):
        load_pascal_voc(root)
    with pytest.raises(DataNotFoundError, match="VOC2012"):
        load_pascal_voc(root / "JPEGImages")
