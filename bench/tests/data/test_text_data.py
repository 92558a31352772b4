"""Loaders of texts, on small stand-ins laid out as the real sets are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from captum_ssm.errors import DataError, DataNotFoundError, OptionError
from captum_ssm_bench.data import load_arc, load_imdb, load_ruler


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


# --- IMDB ----------------------------------------------------------------------------------------


@pytest.fixture
def imdb(tmp_path):
    for name, words in {
        "pos/2_10.txt": "wonderful, naïve<br /><br />and short",
        "pos/10_7.txt": "good",
        "neg/0_1.txt": "",
    }.items():
        path = tmp_path / "test" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words, encoding="utf-8")
    return tmp_path


def test_imdb(imdb):
    found = list(load_imdb(imdb))
    assert [(x.label, x.rating) for x in found] == [(0, 1), (1, 10), (1, 7)]
    assert found[1].text == "wonderful, naïve<br /><br />and short" and found[0].text == ""
    assert found[2].name.endswith("10_7.txt")


def test_broken_imdb(imdb):
    with pytest.raises(OptionError, match="split='dev'"):
        load_imdb(imdb, "dev")
    with pytest.raises(DataNotFoundError, match="train does not exist"):
        load_imdb(imdb, "train")
    (imdb / "test" / "pos" / "2_10.txt").write_bytes(b"na\xefve")
    with pytest.raises(DataError, match=r"2_10\.txt is not utf-8: byte 2"):
        load_imdb(imdb)[1]
    for name in ("3_11.txt", "3_0.txt", "three.txt"):
        path = imdb / "test" / "neg" / name
        path.write_text("")
        with pytest.raises(DataError, match=f"{name} is not named"):
            load_imdb(imdb)
        path.unlink()
    for path in (imdb / "test").glob("*/*.txt"):
        path.unlink()
    with pytest.raises(DataError, match="holds no review"):
        load_imdb(imdb)


# --- ARC -----------------------------------------------------------------------------------------

NESTED = {
    "id": "MCAS_1",
    "question": {
        "stem": "Which is a star?",
        "choices": [{"text": "the sun", "label": "1"}, {"text": "the moon", "label": "2"}],
    },
    "answerKey": "1",
}
FLAT = {
    "id": "MCAS_2",
    "question": "What melts?",
    "choices": {"text": ["iron", "ice", "air"], "label": ["A", "B", "C"]},
    "answerKey": "B",
}


def test_arc(tmp_path):
    first, second = load_arc(write(tmp_path / "arc.jsonl", NESTED, FLAT))
    assert (first.name, first.choices, first.labels, first.answer) == (
        "MCAS_1",
        ("the sun", "the moon"),
        ("1", "2"),
        0,
    )
    assert second.choices[second.answer] == "ice" and second.question == "What melts?"
    assert second.prompt == "Question: What melts?\nA. iron\nB. ice\nC. air\nAnswer:"


BROKEN_ARC = {
    "no key": ({**FLAT, "answerKey": "D"}, "has the answer 'D'.*'A', 'B', 'C'"),
    "two of a name": (
        {**FLAT, "choices": {"text": ["a", "b"], "label": ["B", "B"]}},
        "has the answer 'B'",
    ),
    "lengths": (
        {**FLAT, "choices": {"text": ["a"], "label": ["A", "B"]}},
        "has 1 choices, but 2 labels",
    ),
    "no question": ({"id": "x"}, "has no 'question'.*'id'"),
    "a number": ({**FLAT, "question": 3}, "has a int as 'question'"),
    "choices": (
        {**NESTED, "question": {"stem": "?", "choices": ["a"]}},
        "has choices that are not objects",
    ),
    "numbers": (
        {**FLAT, "choices": {"text": [1, 2], "label": ["A", "B"]}},
        "are not strings",
    ),
}


@pytest.mark.parametrize("case", BROKEN_ARC)
def test_broken_arc(tmp_path, case):
    record, message = BROKEN_ARC[case]
    path = write(tmp_path / "arc.jsonl", NESTED, record)
    with pytest.raises(DataError, match=rf"arc\.jsonl, line 2 .*{message}"):
        load_arc(path)


def test_broken_lines(tmp_path):
    path = tmp_path / "arc.jsonl"
    path.write_text(json.dumps(NESTED) + "\n\n{broken\n")
    with pytest.raises(DataError, match=r"arc\.jsonl, line 3 is not JSON"):
        load_arc(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="line 1 holds a list, not an object"):
        load_arc(path)
    for empty in ("", "\n"):
        path.write_text(empty)
        with pytest.raises(DataError, match="holds no question"):
            load_arc(path)
    with pytest.raises(DataNotFoundError, match="does not exist"):
        load_arc(tmp_path / "none.jsonl")
    with pytest.raises(DataNotFoundError, match="is not a file"):
        load_arc(tmp_path)


# --- RULER ---------------------------------------------------------------------------------------

NEEDLE = {
    "index": 7,
    "input": "One of the numbers for x is: 12.\u2028\nWhat is it? ",
    "outputs": ["12", "13"],
    "length": 1024,
}


def test_ruler(tmp_path):
    later = {
        **NEEDLE,
        "index": 8,
        "outputs": "12",
        "answer_prefix": "It is",
        "token_position_answer": 3,
    }
    first, second = load_ruler(write(tmp_path / "validation.jsonl", NEEDLE, later))
    assert (first.index, first.answers, first.length) == (7, ("12", "13"), 1024)
    assert first.prompt == first.text == NEEDLE["input"]
    assert second.prompt == NEEDLE["input"] + "It is" and second.answers == ("12",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": []}, "one or more strings"),
        ({"outputs": [""]}, "one or more strings"),
        ({"outputs": [12]}, "one or more strings"),
        ({"outputs": 12}, "has a int as 'outputs'"),
        ({"input": None}, "has a NoneType as 'input'"),
        ({"length": "1k"}, "has a str as 'length'"),
        ({"index": True}, "has a bool as 'index'"),
        ({"answer_prefix": 1}, "has a int as 'answer_prefix'"),
    ],
)
def test_broken_ruler(tmp_path, change, message):
    path = write(tmp_path / "v.jsonl", NEEDLE, {**NEEDLE, **change})
    with pytest.raises(DataError, match=rf"v\.jsonl, line 2 .*{message}"):
        load_ruler(path)


def test_empty_ruler(tmp_path):
    with pytest.raises(DataError, match="holds no example"):
        load_ruler(write(tmp_path / "v.jsonl", *[]))
