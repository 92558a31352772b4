"""Results on disk: appended, read back, and whole after any interruption."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from captum_ssm.errors import InputError
from captum_ssm_bench import Key, Records


def key(example: int, method: str = "m") -> Key:
    return Key("e", "model", method, "f", 0, example)


def rows(value: float) -> dict[str, dict[str, float]]:
    return {"": {"x": value}, "layer 1": {"x": value / 3, "y": math.nan}}


def test_what_is_appended_is_read_back_exactly(tmp_path: Path) -> None:
    numbers = [random.random() * 10 ** random.randint(-20, 20) for _ in range(9)]
    for i, number in enumerate(numbers):
        Records(tmp_path, i % 3).append(key(i), rows(number))
    found = dict(Records(tmp_path))
    assert [found[key(i)][""]["x"] for i in range(9)] == numbers
    assert [found[key(i)]["layer 1"]["x"] for i in range(9)] == [n / 3 for n in numbers]
    assert math.isnan(found[key(0)]["layer 1"]["y"])


def test_results_are_sorted_and_count_once(tmp_path: Path) -> None:
    order = random.sample(range(12), 12)
    for i in order:
        Records(tmp_path, i % 2).append(key(i), rows(i))
    Records(tmp_path, 5).append(key(3), rows(99.0))
    found = list(Records(tmp_path))
    assert [k.example for k, _ in found] == list(range(12))
    assert found[3][1][""]["x"] == 3.0


@pytest.mark.parametrize("left", [1, 0.5, 0.99])
def test_a_line_without_an_end_is_skipped_and_taken_off(tmp_path: Path, left: float) -> None:
    """What a process leaves that is killed while it writes."""
    records = Records(tmp_path)
    for i in range(3):
        records.append(key(i), rows(i))
    path = tmp_path / "records-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = 1 if left == 1 else int(left * len(lines[2]))
    path.write_bytes(b"".join(lines[:2]) + lines[2][:kept])
    assert [k.example for k, _ in records] == [0, 1]
    Records(tmp_path).append(key(2), rows(7.0))
    assert path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert dict(records)[key(2)] == dict(Records(tmp_path))[key(2)] and len(list(records)) == 3


@pytest.mark.parametrize("line", ["no json", "[]", '{"rows": {}}', '{"rows": 3, "example": 1}'])
def test_a_line_that_is_no_result(tmp_path: Path, line: str) -> None:
    Records(tmp_path).append(key(0), rows(0.0))
    with (tmp_path / "records-0.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"records-0\.jsonl, line 2 is not a result"):
        list(Records(tmp_path))
