"""Files of data that declare absurd sizes, or lead elsewhere, are refused before they are read."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.little_memory import at_most

from captum_ssm.errors import DataError
from captum_ssm.models.image_files import check_pixels, read_image, read_labels
from captum_ssm_bench.data import (
    load_imagenet_segmentation,
    load_pascal_voc,
    load_ruler,
    load_valence,
)
from captum_ssm_bench.data import valence as of_valence

_INSIDE = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
_MOVIES = of_valence.SOURCES["movies"]


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Sizes are to be checked before memory is taken for them."""
    with at_most():
        yield


# --- images -------------------------------------------------------------------------------------


def png(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG of so many grey pixels, which it does not hold."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", head), *more, (b"IDAT", zlib.compress(b"\0" * 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


BOMB = zlib.compress(bytes(2**27))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png(2**31 - 1, 2**31 - 1), "cannot be read as an image.*exceeds|declares"),
        (png(20_000, 20_000), "cannot be read as an image.*exceeds|declares"),
        (png(3, 3, (b"zTXt", b"a\0\0" + BOMB)), "cannot be read as an image"),
        (png(3, 3, (b"iTXt", b"a\0\1\0\0\0" + BOMB)), "cannot be read as an image"),
        (png(3, 3, (b"iCCP", b"a\0\0" + BOMB)), "cannot be read as an image"),
        (png(3, 3)[:40], "cannot be read as an image"),
        (png(0, 3), "cannot be read as an image"),
        (b"", "cannot be read as an image"),
    ],
    ids=("vast", "large", "text", "international", "profile", "cut", "flat", "empty"),
)
def test_images(content: bytes, message: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for read in (read_image, read_labels):
        with pytest.raises(DataError, match=message):
            read(path)


def test_the_most_pixels() -> None:
    check_pixels("a", (2**14, 2**14))
    with pytest.raises(DataError, match=r"a declares 16384 x 16385 pixels; at most 268435456"):
        check_pixels("a", (2**14, 2**14 + 1))


# --- MATLAB's file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ((3, 10**6, 10**9), (4, 2)),
        ((10**15, 4, 2), (4, 2)),
        ((3, 4, 2), (10**8, 10**7)),
        ((10**5, 10**5, 10**2, 2), (4, 2)),
        ((10**15,), (4, 2)),
    ],
)
def test_imagenet_segmentation(
    image: tuple[int, ...], mask: tuple[int, ...], tmp_path: Path
) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "gtsegs_ijcv.mat"
    with h5py.File(path, "w") as data:
        for name, shape in (("image", image), ("mask", mask)):
            chunks = tuple(min(8, size) for size in shape)
            data.create_dataset(name, shape, "uint8", chunks=chunks)
        for at, of in (("cell", "mask"), ("value/img", "image"), ("value/gt", "cell")):
            data[at] = np.array([[data[of].ref]], h5py.ref_dtype)
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"image 0 (declares|has shape)"):
        load_imagenet_segmentation(path)[0]


def test_a_reference_to_no_array(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "gtsegs_ijcv.mat"
    with h5py.File(path, "w") as data:
        data.create_group("image")
        for at, of in (("cell", "image"), ("value/img", "image"), ("value/gt", "cell")):
            data[at] = np.array([[data[of].ref]], h5py.ref_dtype)
    with pytest.raises(DataError, match="image 0 points at nothing"):
        load_imagenet_segmentation(path)[0]


# --- Pascal VOC's list --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b"])
def test_a_split_that_leads_elsewhere(name: str, tmp_path: Path) -> None:
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text(f"good\n{name}\n")
    with pytest.raises(DataError, match=r"val\.txt names '.*', which would lie outside"):
        load_pascal_voc(tmp_path)


# --- archives -----------------------------------------------------------------------------------


def tar(*members: tuple[str, int, bytes]) -> bytes:
    """A packed archive of members of a name, a declared size and what is there."""
    out = io.BytesIO()
    for name, size, content in members:
        info = tarfile.TarInfo(name)
        info.size = size
        out.write(info.tobuf(tarfile.GNU_FORMAT))
        out.write(content + bytes(-len(content) % 512))
    return gzip.compress(out.getvalue() + bytes(1024), mtime=0)


TEXT = b"1\t3.2\tA joy.\n2\t-2.5\tDull.\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar((_MOVIES, 10**15, b"")), "would take 1000000000000000 bytes; at most"),
        (tar(("other", 2**40, b""), (_MOVIES, len(TEXT), TEXT)), "other would take"),
        (tar((_MOVIES, 10_000, TEXT)), "neither the source distribution nor its archive"),
        (tar((_MOVIES, len(TEXT), TEXT))[:60], "neither the source distribution nor"),
        (tar((_MOVIES, len(TEXT), TEXT))[:30] + bytes(60), "neither the source distribution nor"),
    ],
    ids=["huge", "huge beside it", "shorter than declared", "cut off", "damaged"],
)
def test_tar(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hutto_ICWSM_2014.tar.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_valence(path, "train")


def test_the_same_archive_unharmed(tmp_path: Path) -> None:
    path = tmp_path / "hutto_ICWSM_2014.tar.gz"
    path.write_bytes(tar((_MOVIES, len(TEXT), TEXT)))
    assert [text.label for text in load_valence(path, "train")] == [1, 0]


def test_zip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_valence, "_MOST_BYTES", 2**20)
    path = tmp_path / "vaderSentiment-0.5.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr(_INSIDE, bytes(2**24))
    assert path.stat().st_size < 2**20
    with pytest.raises(DataError, match=r"would take 16777216 bytes; at most 1048576"):
        load_valence(path)


def test_a_file_larger_than_an_archive_is(tmp_path: Path) -> None:
    path = tmp_path / "vaderSentiment-0.5.zip"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole, which takes no room
    with pytest.raises(DataError, match=r"zip: vaderSentiment-0\.5\.zip would take 1099511627776"):
        load_valence(path)


def test_a_broken_zip(tmp_path: Path) -> None:
    path = tmp_path / "vaderSentiment-0.5.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr(_INSIDE, tar((_MOVIES, len(TEXT), TEXT)))
    content = bytearray(path.read_bytes())
    content[120:150] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(DataError, match="is a broken archive"):
        load_valence(path)


def test_a_line_of_brackets(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 10**5 + "\n")
    with pytest.raises(DataError, match=r"deep\.jsonl, line 1 is not JSON"):
        load_ruler(tmp_path / "deep.jsonl")
