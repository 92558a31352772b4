"""BIG-bench's tasks and IWSLT17's talks, as they are published and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from captum_ssm.errors import DataError, DataNotFoundError
from captum_ssm_bench.data import (
    load_arc,
    load_big_bench,
    load_choices,
    load_gold_alignment,
    load_iwslt17,
)

SARCASTIC = "Which statement is sarcastic? (a) Nice weather (b) Nice hail"
ARGUMENT = "Is the argument valid?"


def task(folder: Path, *examples: Any) -> Path:
    path = folder / "task.json"
    path.write_text(json.dumps({"name": "task", "examples": list(examples)}), encoding="utf-8")
    return path


def test_both_layouts_of_big_bench(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        {"input": SARCASTIC, "target_scores": {"(a)": 0, "(b)": 1}},
        {"input": f"{ARGUMENT}\nOptions:\n- valid \n- invalid", "target": "invalid"},
        {"input": "Which?\nOptions:\n(A) this one\n(B) that one", "target": "(B)"},
    )
    first, second, third = load_big_bench(path)
    assert (first.question, first.choices, first.answer) == (SARCASTIC, ("(a)", "(b)"), 1)
    assert (second.question, second.choices) == (ARGUMENT, ("valid", "invalid"))
    assert (second.labels, second.answer) == (("A", "B"), 1)
    assert (third.choices, third.labels, third.answer) == (("this one", "that one"), ("A", "B"), 1)
    assert third.prompt == "Question: Which?\nA. this one\nB. that one\nAnswer:"
    assert load_choices(path) == [first, second, third]


def test_commonsense_questions_are_read_as_arc_is(tmp_path: Path) -> None:
    path = tmp_path / "dev_rand_split.jsonl"
    choices = [{"label": "A", "text": "bank"}, {"label": "B", "text": "mall"}]
    question = {"question_concept": "door", "stem": "Where is it ?", "choices": choices}
    record = {"answerKey": "A", "id": "1afa", "question": question}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert load_choices(path) == load_arc(path)
    assert load_choices(path)[0].choices == ("bank", "mall")


BROKEN: dict[str, tuple[Any, str]] = {
    "no text": ({"target_scores": {"a": 1}}, "example 0 has no text 'input'"),
    "no object": ("text", "example 0 has no text 'input'"),
    "neither": ({"input": "Is it?", "target": "yes"}, "neither 'target_scores' nor options"),
    "an odd option": ({"input": "?\nOptions:\n1. yes", "target": "yes"}, "neither"),
    "no right one": ({"input": "?", "target_scores": {"a": 0, "b": 0}}, "has 0 right answers"),
    "two right ones": ({"input": "?", "target_scores": {"a": 1, "b": 1}}, "has 2 right answers"),
    "another answer": ({"input": "?\nOptions:\n- yes\n- no", "target": "maybe"}, "has 0 right"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tasks(name: str, tmp_path: Path) -> None:
    record, message = BROKEN[name]
    with pytest.raises(DataError, match=message):
        load_big_bench(task(tmp_path, record))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"examples": []}', '{"examples": 3}'])
def test_files_that_are_no_tasks(text: str, tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"task\.json"):
        load_big_bench(path)
    with pytest.raises(DataNotFoundError):
        load_big_bench(tmp_path / "none.json")


def talk(folder: Path, language: str, *sentences: str) -> Path:
    path = folder / f"IWSLT17.TED.tst2015.de-en.{language}.xml"
    segments = "\n".join(f'<seg id="{i}"> {s} </seg>' for i, s in enumerate(sentences, start=1))
    path.write_text(
        f'<?xml version="1.0" encoding="UTF-8"?>\n<mteval>\n<srcset setid="x" srclang="any">\n'
        f'<doc docid="1" genre="lectures">\n<title>Häuser</title>\n{segments}\n</doc>\n</srcset>\n'
        "</mteval>",
        encoding="utf-8",
    )
    return path


def test_talks(tmp_path: Path) -> None:
    files = (
        talk(tmp_path, "de", "Danke &amp; Grüße .", "Ja ."),
        talk(tmp_path, "en", "Thanks .", ""),
    )
    assert load_iwslt17(*files) == [("Danke & Grüße .", "Thanks ."), ("Ja .", "")]
    links = tmp_path / "links"
    links.write_text("0-0 3-1\n\n")
    first, second = load_gold_alignment(*files, links, first=0)
    assert first.source == ("Danke", "&", "Grüße", ".") and first.sure == {(0, 0), (3, 1)}
    assert second.target == () and not second.possible


def test_broken_talks(tmp_path: Path) -> None:
    whole, short = talk(tmp_path, "de", "Ja .", "Nein ."), talk(tmp_path, "en", "Yes .")
    with pytest.raises(DataError, match=r"2 sentences.* 1: each needs its translation"):
        load_iwslt17(whole, short)
    with pytest.raises(DataError, match="holds no <seg>"):
        load_iwslt17(whole, talk(tmp_path, "fr"))
    broken = tmp_path / "broken.xml"
    broken.write_bytes(whole.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"broken\.xml is not XML"):
        load_iwslt17(broken, whole)
    with pytest.raises(DataNotFoundError):
        load_iwslt17(whole, tmp_path / "none.xml")
