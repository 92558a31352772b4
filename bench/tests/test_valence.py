"""Loading of rated texts, on small stand-ins laid out as the real ones are, whole and broken."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from bench_helpers.valence_texts import (
    REAL,
    needs_real_texts,
    rated_texts,
    write_distribution,
    write_folder,
)

from captum_ssm.errors import DataError, DataNotFoundError, OptionError
from captum_ssm_bench.valence import SOURCES, SPLITS, VARIABLE, load_valence

MOVIES = SOURCES["movies"]


def test_splits_share_no_text_and_forms_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = rated_texts(60, random.Random(random.random()))
    folder = write_folder(tmp_path / "folder", files)
    whole = write_distribution(tmp_path / "vaderSentiment-0.5.zip", files)
    monkeypatch.setenv(VARIABLE, str(folder))
    found = {split: load_valence(split, tuple(SOURCES)) for split in SPLITS}
    names = [text.name for texts in found.values() for text in texts]
    assert 120 < len(set(names)) == len(names) < 240, "a quarter is neutral"
    by_words: dict[tuple[str, ...], set[str]] = {}
    for split, texts in found.items():
        for text in texts:
            assert abs(text.valence) >= 1 and text.label == int(text.valence > 0)
            by_words.setdefault(text.words, set()).add(split)
    assert {len(splits) for splits in by_words.values()} == {1}
    monkeypatch.setenv(VARIABLE, str(whole))
    assert load_valence("train", tuple(SOURCES)) == found["train"]


def test_misuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = [{"split": "dev"}, {"sources": ["imdb"]}]
    for each in options:
        with pytest.raises(OptionError, match=next(iter(each))):
            load_valence(**each)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(DataNotFoundError, match=r"gone.*names no file.*pip download"):
        load_valence()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(DataNotFoundError, match=rf"{VARIABLE}=None.*pip download vaderSentiment"):
        load_valence()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"1\t2.0\tgood\n2\t2.0\n", 2),
        (b"\n1\tmuch\tgood\n", 2),
        (b"1\t4.5\tgood\n", 1),
    ],
)
def test_broken_texts(
    content: bytes, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MOVIES).write_bytes(content)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match=rf"line {line} is not an ID, a valence"):
        load_valence()


@needs_real_texts
def test_the_real_texts() -> None:
    assert REAL
    movies = [text for split in SPLITS for text in load_valence(split)]
    assert len(movies) == 9173
    assert 0.45 < sum(text.label for text in movies) / len(movies) < 0.55
