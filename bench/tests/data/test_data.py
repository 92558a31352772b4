"""Loaders of data, on small stand-ins laid out as the real sets are, whole and broken."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_helpers.valence_texts import (
    REAL,
    needs_real_texts,
    rated_texts,
    write_distribution,
    write_folder,
)
from helpers.little_memory import at_most

from captum_ssm.errors import DataError, DataNotFoundError, OptionError
from captum_ssm_bench.data import (
    AlignedPair,
    load_arc,
    load_gold_alignment,
    load_imagenet_segmentation,
    load_ruler,
    load_valence,
)
from captum_ssm_bench.data import valence as of_valence
from captum_ssm_bench.data.valence import SOURCES, SPLITS, VARIABLE

# --- prompts ---------------------------------------------------------------------------------

QUESTION = {
    "stem": "Which is a gas?",
    "choices": [{"text": t, "label": t[0]} for t in ("ice", "air")],
}
FLAT = {"question": "Which?", "choices": {"text": ["ice"], "label": ["i"]}, "answerKey": "i"}
LONG = {"index": 3, "input": "The key is 42. What is it?", "outputs": ["42"], "length": 16}


def written(folder: Path, *records: Any) -> Path:
    path = folder / "some.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n\n" for record in records), encoding="utf-8")
    return path


def test_questions_in_both_layouts(tmp_path: Path) -> None:
    first, second = load_arc(
        written(tmp_path, {"id": "7", "question": QUESTION, "answerKey": "a"}, FLAT)
    )
    assert (first.name, first.choices, first.labels, first.answer) == (
        *("7", ("ice", "air"), ("i", "a")),
        1,
    )
    assert first.prompt == "Question: Which is a gas?\ni. ice\na. air\nAnswer:"
    assert (second.name, second.question, second.answer) == ("3", "Which?", 0)


def test_long_texts(tmp_path: Path) -> None:
    later = {**LONG, "outputs": "7", "answer_prefix": " It is"}
    first, second = load_ruler(written(tmp_path, LONG, later))
    assert (first.index, first.prompt, first.answers) == (3, LONG["input"], ("42",))
    assert second.prompt.endswith("What is it? It is") and second.answers == ("7",)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**FLAT, "answerKey": "x"}, "line 1 has the answer 'x'"),
        ({**FLAT, "choices": {"text": [], "label": []}}, "has 0 choices"),
        ({**FLAT, "choices": {"text": ["a", "b"], "label": ["A"]}}, "2 choices, but 1 labels"),
        ({**FLAT, "choices": {"text": [1], "label": ["A"]}}, "that are not strings"),
        ({**FLAT, "question": {"stem": "?", "choices": ["a"]}}, "that are not objects"),
        ({**LONG, "outputs": []}, "'outputs' that are not"),
        ({**LONG, "index": "3"}, "index"),
        ([1], "line 1"),
    ],
)
def test_broken_prompts(record: Any, message: str, tmp_path: Path) -> None:
    load = load_ruler if isinstance(record, dict) and "input" in record else load_arc
    with pytest.raises(DataError, match=message):
        load(written(tmp_path, record))


def test_files_without_prompts(tmp_path: Path) -> None:
    for load in (load_arc, load_ruler):
        with pytest.raises(DataError, match="holds none of"):
            load(written(tmp_path))
        with pytest.raises(DataNotFoundError, match="nowhere does not exist"):
            load(tmp_path / "nowhere")
        (tmp_path / "deep.jsonl").write_text("[" * 10**5 + "\n")
        with pytest.raises(DataError, match=r"deep\.jsonl, line 1 is not JSON"):
            load(tmp_path / "deep.jsonl")


# --- alignments ------------------------------------------------------------------------------

PAIRS = [("das ist schön", "that is nice indeed"), ("", "oh"), ("ja !", "yes !")]


def sentences(folder: Path, ending: str = "") -> tuple[Path, Path]:
    paths = folder / f"de{ending}", folder / f"en{ending}"
    for path, side in zip(paths, zip(*PAIRS, strict=True), strict=True):
        text = "".join(f"{line}\n" for line in side)
        if ending:
            segments = "".join(f'<seg id="{i}"> {line} </seg>' for i, line in enumerate(side))
            text = f"<mteval><srcset><doc><title>x</title>{segments}</doc></srcset></mteval>"
        path.write_text(text, encoding="utf-8")
    return paths


@pytest.mark.parametrize("ending", ["", ".xml"])
def test_gold_links(ending: str, tmp_path: Path) -> None:
    links = tmp_path / "links.talp"
    links.write_text("1-1 3p4 2-2 2p2\n\n1-1 2-2\n")
    found = load_gold_alignment(*sentences(tmp_path, ending), links)
    assert found[0] == AlignedPair(
        ("das", "ist", "schön"),
        ("that", "is", "nice", "indeed"),
        frozenset({(0, 0), (1, 1)}),
        frozenset({(0, 0), (1, 1), (2, 3)}),
    )
    assert found[1] == AlignedPair((), ("oh",), frozenset(), frozenset())
    sure, possible = found[0].matrices()
    assert sure.shape == (4, 3) and sure.nonzero().tolist() == [[0, 0], [1, 1]]
    assert possible.nonzero().tolist() == [[0, 0], [1, 1], [3, 2]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1-1\n", "has 1 lines for 3 sentences"),
        ("1-1\n\n1x1\n", "line 3 holds '1x1'"),
        ("1-1\n\n3-1\n", "line 3 holds '3-1'.*2 words and its translation 2, counted from 1"),
        ("1-5\n\n\n", "line 1 holds '1-5'"),
        ("0-1\n\n\n", "line 1 holds '0-1'"),
    ],
)
def test_broken_links(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "links").write_text(content)
    with pytest.raises(DataError, match=f"links.*{message}"):
        load_gold_alignment(*sentences(tmp_path), tmp_path / "links")


def test_broken_sentences(tmp_path: Path) -> None:
    (source, target), links = sentences(tmp_path), tmp_path / "links"
    links.write_text("\n\n\n")
    for name, content, message in (
        ("short", b"one\n", r"short has 1 sentences, .*en 3"),
        ("coded", "schön\n".encode("latin-1"), "coded is not utf-8"),
        ("a.xml", b"<seg>", r"a\.xml is not XML"),
        ("b.xml", b"<a/>", r"b\.xml holds no <seg>"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_gold_alignment(tmp_path / name, target, links)
    with pytest.raises(DataNotFoundError, match="none does not exist"):
        load_gold_alignment(source, target, tmp_path / "none")


# --- ImageNet-Segmentation -------------------------------------------------------------------


def write_mat(path: Path, images: list[Any], masks: list[Any]) -> Path:
    """As MATLAB 7.3 writes it: cells hold references, arrays have their axes reversed."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as data:
        kept = data.create_group("#refs#")
        refs: dict[str, list[Any]] = {"img": [], "gt": []}
        for n, image in enumerate(images):
            refs["img"].append(kept.create_dataset(f"i{n}", data=image.T).ref)
        for n, mask in enumerate(masks):
            inner = np.array([[kept.create_dataset(f"m{n}", data=mask.T).ref]], dtype=object)
            refs["gt"].append(kept.create_dataset(f"c{n}", data=inner, dtype=h5py.ref_dtype).ref)
        for name, found in refs.items():
            cells = np.array(found, dtype=object)[:, None]
            data.create_dataset(f"/value/{name}", data=cells, dtype=h5py.ref_dtype)
    return path


def noise(height: int, width: int) -> Any:
    return np.random.randint(0, 256, (height, width, 3), dtype=np.uint8)


def test_imagenet_segmentation(tmp_path: Path) -> None:
    images = [noise(4, 7), noise(9, 3), noise(5, 5)]
    masks = [np.random.randint(0, 2, image.shape[:2], dtype=np.uint8) for image in images]
    images[2] = images[2][..., 0]  # some are grey
    found = load_imagenet_segmentation(write_mat(tmp_path / "gt.mat", images, masks))
    assert len(found) == 3
    for example, image, mask in zip(found, images, masks, strict=True):
        colored = image if image.ndim == 3 else np.stack([image] * 3, -1)
        assert torch.equal(example.image, torch.from_numpy(colored).permute(2, 0, 1))
        assert torch.equal(example.labels, torch.from_numpy(mask).long())
    assert torch.equal(pickle.loads(pickle.dumps(found))[-1].labels, found[2].labels)


IMAGE, MASK = np.zeros((4, 7, 3), np.uint8), np.ones((4, 7), np.uint8)


@pytest.mark.parametrize(
    ("images", "masks", "message"),
    [
        ([IMAGE], [MASK, MASK], r"gt\.mat.*1 images, but 2 masks"),
        ([IMAGE], [MASK[1:]], r"image 0.*Height and width"),
        ([IMAGE], [MASK + 1], r"image 0 has labels \[2\]"),
        ([np.zeros((4, 7, 4), np.uint8)], [MASK], r"image 0 has shape \(4, 7, 4\)"),
    ],
)
def test_broken_segmentations(images: Any, masks: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_imagenet_segmentation(write_mat(tmp_path / "gt.mat", images, masks))[0]


@pytest.mark.parametrize(
    "shapes", [((3, 10**6, 10**9), (4, 2)), ((3, 4, 2), (10**8, 10**7)), ((10**15,), (4, 2))]
)
def test_absurd_sizes_are_refused_before_memory_is_taken(shapes: Any, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "gtsegs_ijcv.mat"
    with h5py.File(path, "w") as data:
        for name, shape in zip(("image", "mask"), shapes, strict=True):
            chunks = tuple(min(8, size) for size in shape)
            data.create_dataset(name, shape, "uint8", chunks=chunks)
        for at, of in (("cell", "mask"), ("value/img", "image"), ("value/gt", "cell")):
            data[at] = np.array([[data[of].ref]], h5py.ref_dtype)
    with at_most(), pytest.raises(DataError, match=r"image 0 (declares|has shape)"):
        load_imagenet_segmentation(path)[0]


def test_files_that_are_no_segmentations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py, path = pytest.importorskip("h5py"), tmp_path / "gt.mat"
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
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=r"gt\.mat needs h5py: pip install h5py"):
        load_imagenet_segmentation(path)


# --- rated texts -----------------------------------------------------------------------------

MOVIES = SOURCES["movies"]
TEXT = b"1\t3.2\tA joy.\n2\t-2.5\tDull.\n"


def test_splits_share_no_text_and_forms_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = rated_texts(60, random.Random(random.random()))
    folder = write_folder(tmp_path / "folder", files)
    whole = write_distribution(tmp_path / "vaderSentiment-0.5.zip", files)
    everything = [t for s in SPLITS for t in load_valence(folder, s, tuple(SOURCES), least=1e-9)]
    assert len({text.name for text in everything}) == len(everything) == 240
    by_words: dict[tuple[str, ...], set[str]] = {}
    for split in SPLITS:
        for text in load_valence(folder, split, tuple(SOURCES)):
            assert abs(text.valence) >= 1 and text.label == int(text.valence > 0)
            by_words.setdefault(text.words, set()).add(split)
    assert {len(splits) for splits in by_words.values()} == {1}
    for path in (whole, whole.with_suffix(".tar.gz")):
        assert load_valence(path, "train") == load_valence(folder, "train")
    monkeypatch.setenv(VARIABLE, str(folder))
    assert load_valence(split="train") == load_valence(folder, "train")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(DataNotFoundError, match=r"gone does not exist.*pip download"):
        load_valence()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(DataNotFoundError, match=rf"set {VARIABLE}.*pip download vaderSentiment"):
        load_valence()


def test_options_that_are_not_known(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, rated_texts(3, random.Random(0)))
    given: list[dict[str, Any]] = [{"split": "dev"}, {"sources": ["imdb"]}, {"least": 0}]
    for options in (*given, {"least": float("nan")}):
        with pytest.raises(OptionError, match=next(iter(options))):
            load_valence(folder, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1\t2.0\tgood\n2\t2.0\n", r"line 2 is not ID, valence and text"),
        (b"1\t2.0\t \n", r"line 1 is not ID"),
        (b"\n1\tmuch\tgood\n", r"line 2 has the valence 'much'"),
        (b"1\tnan\tgood\n", r"line 1 has the valence 'nan'"),
        (b"1\t4.5\tgood\n", r"line 1 has the valence '4\.5', not one from -4 to 4"),
        (b"1\t1.0\tna\xefve\n", r"is not UTF-8.*byte 8"),
        (b"\r\n", "is empty"),
    ],
)
def test_broken_texts(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / MOVIES).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_valence(tmp_path)


def tar(*members: tuple[str, int, bytes]) -> bytes:
    """A packed archive of members of a name, a declared size and what is there."""
    out = io.BytesIO()
    for name, size, content in members:
        info = tarfile.TarInfo(name)
        info.size = size
        out.write(info.tobuf(tarfile.GNU_FORMAT))
        out.write(content + bytes(-len(content) % 512))
    return gzip.compress(out.getvalue() + bytes(1024), mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar((MOVIES, 10**15, b"")), "would take 1000000000000000 bytes; at most"),
        (tar(("other", 2**40, b""), (MOVIES, len(TEXT), TEXT)), "other would take"),
        (tar((MOVIES, 10_000, TEXT)), "neither the source distribution nor its archive"),
        (tar((MOVIES, len(TEXT), TEXT))[:60], "neither the source distribution nor"),
        (tar(("other", 4, b"text")), f"holds no {MOVIES}"),
        (b"a text", "neither the source distribution nor"),
    ],
    ids=["huge", "huge beside it", "shorter than declared", "cut off", "another", "a text"],
)
def test_broken_archives(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hutto_ICWSM_2014.tar.gz"
    path.write_bytes(content)
    with at_most(), pytest.raises(DataError, match=message):
        load_valence(path, "train")


def test_broken_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vaderSentiment-0.5.zip"
    place = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            load_valence(path)

    monkeypatch.setattr(of_valence, "_MOST_BYTES", 2**20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr(place, bytes(2**24))
    refused(r"would take 16777216 bytes; at most 1048576")
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole, which takes no room
    refused(r"zip: vaderSentiment-0\.5\.zip would take 1099511627776")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr(place, tar((MOVIES, len(TEXT), TEXT)))
    content = bytearray(path.read_bytes())
    content[120:150] = bytes(30)
    path.write_bytes(content)
    refused("is a broken archive")
    with zipfile.ZipFile(path, "w") as whole:
        whole.writestr("vaderSentiment/vader_lexicon.txt", "good\t1.9\n")
    refused(r"zip holds no additional_resources.*pip download")


@needs_real_texts
def test_the_real_texts() -> None:
    counts = {split: len(load_valence(REAL, split, tuple(SOURCES))) for split in SPLITS}
    assert sum(counts.values()) == 15849
    movies = [text for split in SPLITS for text in load_valence(REAL, split)]
    assert len(movies) == 9173
    assert 0.45 < sum(text.label for text in movies) / len(movies) < 0.55
