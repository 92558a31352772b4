"""Runs: shared by processes, ended and taken up again, and never mixed with other weights."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from captum_ssm.errors import InputError, OptionError
from captum_ssm_bench import (
    Cell,
    Column,
    Experiment,
    Plan,
    Processes,
    Records,
    Rows,
    Subject,
    lines,
    run,
    write_tables,
)
from captum_ssm_bench.harness.tables import as_markdown, picture


class Ended(Exception):
    """A run's end before its time."""


class Counted(Experiment):
    """Numbers that follow from the example alone, and a count of what was measured."""

    name, title = "counted", "A table"
    columns = (
        Column("x", ("x",)),
        Column("ratio", ("x", "y"), "low", lambda s, _: s[..., :1] / s[..., 1:]),
    )

    def __init__(self, fingerprint: str = "a") -> None:
        self.fingerprint = fingerprint
        self.measured: Counter[Any] = Counter()
        self.loaded: list[str] = []
        self.ends_after = math.inf

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

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if sum(self.measured.values()) >= self.ends_after:
            raise Ended
        self.measured[example, cell] += 1
        value = hash((*example[1:], len(cell.formulation))) % 97 / 7
        if cell.method == "n":
            return {"layer 0": {"x": value, "y": 1.0}, "mean": {"x": math.nan, "y": 2.0}}
        return {"": {"x": value, "y": 3.0}}


def plan(experiment: Counted, examples: int = 5) -> Plan:
    return Plan(experiment, experiment.cells(), examples, (0, 3))


def tables(experiment: Counted, results: Any, folder: Path) -> list[bytes]:
    return [p.read_bytes() for p in write_tables(experiment, lines(experiment, results), folder)]


def test_everything_is_measured_once_and_each_model_loaded_once(tmp_path: Path) -> None:
    experiment = Counted()
    found = run(plan(experiment), tmp_path)
    assert set(experiment.measured.values()) == {1}
    assert len(found) == len(experiment.measured) == 2 * 3 * 2 * 5
    assert experiment.loaded == ["one", "two"]
    again = Counted()
    assert run(plan(again), tmp_path) == found
    assert not again.measured and not again.loaded


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole = run(plan(Counted()), tmp_path / "whole")
    times: Counter[Any] = Counter()
    for ends_after in (7, 20, math.inf):
        experiment = Counted()
        experiment.ends_after = ends_after
        with suppress(Ended):
            found = run(plan(experiment), tmp_path / "parts")
        times += experiment.measured
    assert found == whole and set(times.values()) == {1}


def test_two_processes_give_the_tables_of_one(tmp_path: Path) -> None:
    one, shared = Counted(), [Counted(), Counted()]
    alone = run(plan(one), tmp_path / "one")
    second = threading.Thread(target=run, args=(plan(shared[1]), tmp_path / "two", Processes(1, 2)))
    second.start()
    together = run(plan(shared[0]), tmp_path / "two", Processes(0, 2))
    second.join()
    assert shared[0].measured and shared[1].measured
    assert set((shared[0].measured + shared[1].measured).values()) == {1}
    assert tables(one, alone, tmp_path / "a") == tables(one, together, tmp_path / "b")


def test_more_examples_and_cells_are_added_to_those_there(tmp_path: Path) -> None:
    few = Counted()
    run(Plan(few, few.cells()[:1], 2), tmp_path)
    more = Counted()
    found = run(Plan(more, more.cells(), 3), tmp_path)
    assert not set(few.measured) & set(more.measured)
    assert len(found) == 2 * 3 * 3
    assert len(run(Plan(more, more.cells()[:1], 2), tmp_path)) == 4


def test_results_of_other_weights_are_refused(tmp_path: Path) -> None:
    run(plan(Counted()), tmp_path)
    with pytest.raises(InputError, match="the results of 'one' beside it are of other weights"):
        run(plan(Counted("b")), tmp_path)


def test_trainings_of_a_model_lie_beside_each_other_and_are_one_row(tmp_path: Path) -> None:
    experiment = Counted()
    first = experiment.subjects()[0]
    again = Subject(first.name, first.load, "b", training="b")
    run(Plan(experiment, experiment.cells(), 5, subjects=[first]), tmp_path)
    both = Plan(experiment, experiment.cells(), 5, subjects=[first, again])
    found = run(both, tmp_path)
    assert experiment.loaded == ["one", "one"]  # of the first nothing was left to measure
    assert {key.model for key, _ in found} == {"one", "one@b"}
    table = lines(experiment, found)
    assert {(t.model, t.trainings, t.examples) for t in table} == {("one", 2, 10)}
    assert "## one, 10 examples of 2 trainings" in as_markdown(experiment, table)


def test_cells_of_an_example_are_measured_together(tmp_path: Path) -> None:
    class Noted(Counted):
        open = False

        @contextmanager
        def together(self) -> Iterator[None]:
            self.times, self.open = getattr(self, "times", 0) + 1, True
            yield
            self.open = False

        def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
            assert self.open
            return super().measure(model, example, cell)

    experiment = Noted()
    run(plan(experiment), tmp_path)
    assert experiment.times == 2 * 2 * 5 and not experiment.open


def test_a_device_map_spreads_each_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    experiment = Counted()
    spread: list[nn.Module] = []

    def measure(model: nn.Module, example: Any, cell: Cell) -> Rows:
        spread.append(model)
        return {}

    experiment.measure = measure  # type: ignore[method-assign]
    run(Plan(experiment, experiment.cells()[:1], 1, device_map="cpu"), tmp_path)
    assert len(spread) == 2 and all(hasattr(model, "_hf_hook") for model in spread)


def test_the_table(tmp_path: Path) -> None:
    experiment = Counted()
    table = lines(experiment, run(plan(experiment), tmp_path))
    assert [(t.method, t.formulation, t.row) for t in table[:4]] == [
        ("m", "a", ""),
        ("m", "b", ""),
        ("n", "", "layer 0"),
        ("n", "", "mean"),
    ]
    values = [
        rows[""]["x"]
        for key, rows in Records(tmp_path / "counted")
        if key[1:4] == ("one", "m", "a")
    ]
    first = table[0]
    assert first.model == "one" and first.examples == len(values) == 10
    assert first.entries["x"].value == pytest.approx(sum(values) / 10)
    assert first.entries["ratio"].value == pytest.approx(sum(values) / 30)
    assert first.entries["x"].low <= first.entries["x"].value <= first.entries["x"].high
    assert math.isnan(table[3].entries["x"].value)
    paths = write_tables(experiment, table, tmp_path)
    markdown, comma, json = (p.read_text() for p in paths[:3])
    assert "| n |  | mean | - |" in markdown and "## two, 10 examples" in markdown
    assert comma.count("\n") == len(table) + 1 and '"value": null' in json


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    experiment = Counted()
    table = lines(experiment, run(plan(experiment), tmp_path))
    drawing = picture(experiment.columns, table)
    heads = [axis.get_title() for axis in drawing.axes]
    assert heads == ["x (higher is better)", "ratio (lower is better)"]
    labels = [text.get_text() for text in drawing.axes[0].get_yticklabels()]
    rows = ["m, a", "m, b", "n, layer 0", "n, mean"]
    assert labels == ["", "one", *rows, "", "two", *rows, ""]
    drawn = write_tables(experiment, table, tmp_path)[-1]
    assert drawn.suffix == ".png" and drawn.read_bytes().startswith(b"\x89PNG")


def test_a_table_without_rows_has_no_picture(tmp_path: Path) -> None:
    paths = write_tables(Counted(), [], tmp_path)
    assert [path.suffix for path in paths] == [".md", ".csv", ".json"]


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".", "..", "-x", "a b", "c:\\x"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    experiment = Counted()
    experiment.name = name
    inside = tmp_path / "inside"
    with pytest.raises(OptionError, match=r"name=.* of Counted: files are named after"):
        run(plan(experiment), inside)
    with pytest.raises(OptionError, match=r"name=.* of Counted: files are named after"):
        write_tables(experiment, [], inside)
    assert not list(tmp_path.iterdir()) and not experiment.measured


def test_columns_without_an_entry_are_left_out(tmp_path: Path) -> None:
    experiment = Counted()
    found = run(plan(experiment), tmp_path)

    def heads(method: str) -> set[str]:
        table = lines(experiment, [result for result in found if result[0].method == method])
        return set(re.findall(r"^\| method .*$", as_markdown(experiment, table), re.MULTILINE))

    assert heads("m") == {"| method | formulation | x | ratio |"}
    assert heads("n") == {"| method | row | x | ratio |"}


def test_what_has_to_be_known_stands_below_the_table() -> None:
    experiment = Counted()
    assert as_markdown(experiment, []).endswith("ratio: lower is better.\n")
    experiment.note = "Mind the gap."
    assert as_markdown(experiment, []).endswith("ratio: lower is better. Mind the gap.\n")


def test_choosing_cells() -> None:
    experiment = Counted()
    assert experiment.chosen(["n"]) == [Cell("n")]
    assert experiment.chosen(None, ["b"]) == [Cell("m", "b")]
    assert experiment.chosen(["q"]) == []


@pytest.mark.parametrize("rank, world", [("2", "2"), ("-1", "1")])
def test_a_rank_that_cannot_be(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(OptionError, match="WORLD_SIZE"):
        Processes.launched()


def test_progress(tmp_path: Path) -> None:
    said: list[str] = []
    run(plan(Counted()), tmp_path, log=said.append)
    assert said[-1] == "counted: 20/20 examples, 0 s left"
