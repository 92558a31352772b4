"""The rated texts: forms they are read from, splits, words, and what is wrong with broken ones."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
from bench_helpers.valence_texts import (
    BAD,
    GOOD,
    REAL,
    needs_real_texts,
    rated_texts,
    write_archive,
    write_distribution,
    write_folder,
)

from captum_ssm.errors import DataError, DataNotFoundError, OptionError
from captum_ssm.models import text_words
from captum_ssm_bench.data import load_lexicon, load_valence
from captum_ssm_bench.data.valence import LEXICON, SOURCES, SPLITS, VARIABLE

ALL = tuple(SOURCES)


@pytest.fixture
def files() -> dict[str, str]:
    return rated_texts(60, random.Random(random.random()))


def test_every_form_is_read_alike(files: dict[str, str], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hutto_ICWSM_2014", files)
    places = [
        folder,
        write_archive(tmp_path / "texts.tar.gz", files),
        write_distribution(tmp_path / "vaderSentiment-0.5.zip", files),
    ]
    for split in SPLITS:
        one, two, three = (load_valence(place, split, ALL) for place in places)
        assert one and one == two == three
    assert load_lexicon(folder) == load_lexicon(str(places[1])) == load_lexicon(places[2])
    assert load_lexicon(folder) == {**dict.fromkeys(GOOD, 2.5), **dict.fromkeys(BAD, -1.5)}


def test_splits_part_the_texts(files: dict[str, str], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, files)
    parts = {split: load_valence(folder, split, ALL, least=0.5) for split in SPLITS}
    names = [text.name for part in parts.values() for text in part]
    rows = {
        f"{source}/{row[0]}": row
        for source, name in SOURCES.items()
        for row in (line.split("\t") for line in files[name].splitlines())
    }
    assert len(names) == len(set(names))
    assert set(names) == {name for name, row in rows.items() if abs(float(row[1])) >= 0.5}
    for text in (text for part in parts.values() for text in part):
        assert text.text == rows[text.name][2] and text.valence == float(rows[text.name][1])
        assert text.label == (text.valence > 0)
    assert 0.7 < len(parts["train"]) / len(names) < 0.9
    assert len(parts["test"]) > len(parts["validation"])
    words = {split: {text.words for text in part} for split, part in parts.items()}
    assert not words["train"] & words["test"] and not words["train"] & words["validation"]


def test_sources_and_least(files: dict[str, str], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, files)
    tweets = load_valence(folder, "train", ["tweets"], least=2.5)
    assert tweets and all(text.name.startswith("tweets/") for text in tweets)
    assert all(abs(text.valence) >= 2.5 for text in tweets)
    assert {text.name for text in tweets} < {
        text.name for text in load_valence(folder, "train", ["tweets"])
    }
    assert load_valence(folder) == load_valence(folder, "test", ["movies"], least=1)


def test_the_variable_names_the_place(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "one", files)
    monkeypatch.setenv(VARIABLE, str(folder))
    assert load_valence(split="train") == load_valence(folder, "train")
    other = write_folder(tmp_path / "other", rated_texts(60, random.Random(1)))
    assert load_valence(other, "train") != load_valence(split="train"), "a path comes first"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(DataNotFoundError, match=r"gone does not exist.*pip download"):
        load_lexicon()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(DataNotFoundError, match=rf"set {VARIABLE}.*pip download vaderSentiment"):
        load_valence()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's a Good-ish film :-)", ["it's", "a", "good", "-", "ish", "film", ":-)"]),
        ("Naïve, 10/10...", ["naïve", ",", "10", "/", "10", "..."]),
        ("''Conan'' and '90s", ["''", "conan", "''", "and", "'", "90", "s"]),
        ("snake_case  \t", ["snake", "_", "case"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert list(text_words(text)) == words


def test_bad_options(files: dict[str, str], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, files)
    with pytest.raises(OptionError, match=r"split: 'dev' is not known.*'validation'"):
        load_valence(folder, "dev")
    with pytest.raises(OptionError, match=r"sources: 'imdb' is not known.*'movies'"):
        load_valence(folder, sources=["imdb"])
    for least in (0, -1, float("nan")):
        with pytest.raises(OptionError, match="least="):
            load_valence(folder, least=least)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1\t2.0\tgood\n2\t2.0\n", r"line 2 is not ID, valence and text"),
        (b"1\t2.0\tgood\tor not\n", r"line 1 is not ID"),
        (b"1\t2.0\t \n", r"line 1 is not ID"),
        (b"\n1\tmuch\tgood\n", r"line 2 has the valence 'much'"),
        (b"1\tnan\tgood\n", r"line 1 has the valence 'nan'"),
        (b"1\t4.5\tgood\n", r"line 1 has the valence '4\.5', not one from -4 to 4"),
        (b"1\t1.0\tna\xefve\n", r"is not utf-8.*byte 8"),
        (b"\r\n", "is empty"),
    ],
)
def test_broken_texts(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / SOURCES["movies"]).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_valence(tmp_path)


def test_broken_lexicon(tmp_path: Path) -> None:
    for content, message in (("good\n", "line 1 is not a word"), ("good\t5\n", "'5', not one")):
        folder = write_folder(tmp_path / message[:6], {LEXICON: content})
        with pytest.raises(DataError, match=message):
            load_lexicon(folder)


def test_files_that_hold_no_texts(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"movieReview\S* does not exist"):
        load_valence(tmp_path)
    wheel = tmp_path / "vaderSentiment-3.whl"
    with zipfile.ZipFile(wheel, "w") as whole:
        whole.writestr("vaderSentiment/vader_lexicon.txt", "good\t1.9\n")
    with pytest.raises(DataError, match=r"whl holds no additional_resources.*pip download"):
        load_valence(wheel)
    with pytest.raises(DataError, match=r"holds no movieReviewSnippets_GroundTruth\.txt"):
        load_valence(write_archive(tmp_path / "half.tar.gz", {LEXICON: "good\t1.9\n"}))
    (tmp_path / "notes.txt").write_text("good")
    with pytest.raises(DataError, match=r"notes\.txt is neither the source distribution"):
        load_valence(tmp_path / "notes.txt")


@needs_real_texts
def test_the_real_texts() -> None:
    counts = {split: len(load_valence(REAL, split, ALL)) for split in SPLITS}
    assert sum(counts.values()) == 15849
    movies = [text for split in SPLITS for text in load_valence(REAL, split)]
    assert len(movies) == 9173
    assert 0.45 < sum(text.label for text in movies) / len(movies) < 0.55
    everything = [t for split in SPLITS for t in load_valence(REAL, split, ALL, least=1e-9)]
    assert max(len(text.words) for text in everything) < 190
    lexicon = load_lexicon(REAL)
    assert len(lexicon) == 7502
    assert lexicon["good"] == 1.9 and lexicon["horrible"] == -2.5 and lexicon[":)"] > 0
    named = [any(lexicon.get(w, 0) * t.valence > 0 for w in t.words) for t in movies]
    assert 0.6 < sum(named) / len(named) < 0.9
