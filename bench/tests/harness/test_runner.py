"""Runs: ended and taken up again, and never mixed with other weights."""

from __future__ import annotations

import getpass
import json
import math
import platform
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.full_disk import full_disk
from torch import nn

from captum_ssm.errors import InputError, WriteError
from captum_ssm_bench import (
    Cell,
    Column,
    Experiment,
    Key,
    Plan,
    Records,
    Rows,
    Subject,
    run,
)
from captum_ssm_bench.harness.runner import note_machine


class Ended(Exception):
    """A run's end before its time."""


class Counted(Experiment):
    """Numbers that follow from the example alone, and a count of what was measured."""

    name, title = "counted", "A table"
    columns = (Column("x", ("x",)),)

    def __init__(self, fingerprint: str = "a") -> None:
        self.fingerprint = fingerprint
        self.measured: Counter[Any] = Counter()
        self.loaded: list[str] = []
        self.ends_after, self.times, self.open = math.inf, 0, False

    def subjects(self) -> list[Subject]:
        def load(device: torch.device, name: str) -> nn.Module:
            self.loaded.append(name)
            return nn.Linear(1, 1, device=device)

        return [
            Subject(name, lambda device, name=name: load(device, name), self.fingerprint)
            for name in ("one", "two")
        ]

    def cells(self) -> list[Cell]:
        return [Cell("m", "a"), Cell("m", "b"), Cell("n")]

    def example(self, subject: Subject, index: int, seed: int) -> Any:
        return subject.name, seed, index

    @contextmanager
    def together(self) -> Iterator[None]:
        self.times, self.open = self.times + 1, True
        yield
        self.open = False

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        assert self.open
        if sum(self.measured.values()) >= self.ends_after:
            raise Ended
        self.measured[example, cell] += 1
        value = hash((*example[1:], len(cell.formulation))) % 97 / 7
        if cell.method == "n":
            return {"layer 0": {"x": value}, "mean": {"x": value / 2}}
        return {"": {"x": value}}


def plan(experiment: Counted, examples: int = 5) -> Plan:
    return Plan(experiment, experiment.cells(), examples, (0, 3))


# --- runs ------------------------------------------------------------------------------------


def test_everything_is_measured_once_and_each_model_loaded_once(tmp_path: Path) -> None:
    experiment = Counted()
    found = run(plan(experiment), tmp_path)
    assert set(experiment.measured.values()) == {1}
    assert len(found) == len(experiment.measured) == 2 * 3 * 2 * 5
    assert experiment.loaded == ["one", "two"]
    assert experiment.times == 2 * 2 * 5 and not experiment.open
    again = Counted()
    assert run(plan(again), tmp_path) == found
    assert not again.measured and not again.loaded


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole, times = run(plan(Counted()), tmp_path / "whole"), Counter[Any]()
    for ends_after in (7, 20, math.inf):
        experiment = Counted()
        experiment.ends_after = ends_after
        with suppress(Ended):
            found = run(plan(experiment), tmp_path / "parts")
        times += experiment.measured
    assert found == whole and set(times.values()) == {1}


def test_more_examples_and_cells_are_added_to_those_there(tmp_path: Path) -> None:
    few, more = Counted(), Counted()
    run(Plan(few, few.cells()[:1], 2), tmp_path)
    found = run(Plan(more, more.cells(), 3), tmp_path)
    assert not set(few.measured) & set(more.measured)
    assert len(found) == 2 * 3 * 3
    assert len(run(Plan(more, more.cells()[:1], 2), tmp_path)) == 4


def test_results_of_other_weights_are_refused(tmp_path: Path) -> None:
    run(plan(Counted()), tmp_path)
    with pytest.raises(InputError, match="the results of 'one' beside it are of other weights"):
        run(plan(Counted("b")), tmp_path)


def test_the_note_of_a_run_names_no_place(tmp_path: Path) -> None:
    text = note_machine(tmp_path).read_text()
    found = json.loads(text)
    assert found["torch"] == torch.__version__ and platform.system() in found["system"]
    for private in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert private not in text
    assert getpass.getuser() not in found.values()


# --- records ---------------------------------------------------------------------------------


def key(example: int) -> Key:
    return Key("e", "model", "m", "f", 0, example)


def test_what_is_appended_is_read_back_sorted_and_once(tmp_path: Path) -> None:
    numbers = [random.random() * 10 ** random.randint(-20, 20) for _ in range(9)]
    for i in random.sample(range(9), 9):
        Records(tmp_path).append(key(i), {"": {"x": numbers[i]}, "l": {"y": math.nan}})
    Records(tmp_path).append(key(3), {"": {"x": 99.0}})
    found = list(Records(tmp_path))
    assert [k.example for k, _ in found] == list(range(9))
    assert [rows[""]["x"] for _, rows in found] == numbers
    assert math.isnan(found[0][1]["l"]["y"])


@pytest.mark.parametrize("left", [0, 0.5, 0.99])
def test_a_line_without_an_end_is_skipped_and_taken_off(tmp_path: Path, left: float) -> None:
    """A process leaves one that is killed while it writes."""
    records = Records(tmp_path)
    for i in range(3):
        records.append(key(i), {"": {"x": i}})
    path = tmp_path / "records.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:2]) + whole[2][: 1 + int(left * (len(whole[2]) - 2))])
    assert [k.example for k, _ in records] == [0, 1]
    Records(tmp_path).append(key(2), {"": {"x": 7.0}})
    assert path.read_bytes().splitlines(keepends=True)[:2] == whole[:2]
    assert dict(records)[key(2)][""]["x"] == 7 and len(list(records)) == 3


@pytest.mark.parametrize("line", ["no json", "[]", '{"rows": {}}', '{"rows": 3, "example": 1}'])
def test_a_line_that_is_no_result(tmp_path: Path, line: str) -> None:
    Records(tmp_path).append(key(0), {"": {"x": 0.0}})
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"records\.jsonl, line 2 is not a result"):
        list(Records(tmp_path))


# --- full disks ------------------------------------------------------------------------------


def test_records_go_on_after_a_full_disk(tmp_path: Path) -> None:
    """The part that was cut off is removed, and measured again."""
    records = Records(tmp_path)
    records.append(key(0), {"": {"x": 0.0}})
    own = tmp_path / "records.jsonl"
    room = own.stat().st_size + 20
    with full_disk(room), pytest.raises(WriteError, match=r"records\.jsonl could not be written"):
        records.append(key(1), {"": {"x": 1 / 7}})
    assert own.stat().st_size == room and [each.example for each, _ in records] == [0]
    records.append(key(1), {"": {"x": 1 / 7}})
    assert [each.example for each, _ in records] == [0, 1]
    with pytest.raises(WriteError, match="could not be written"):
        Records(own)
