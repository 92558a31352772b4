"""The rows of a table that are shown, and how they are printed."""

from __future__ import annotations

import math
import random

import pytest

from captum_ssm_bench import Column, Entry, Experiment, Line, Subject
from captum_ssm_bench.harness.excerpt import ROWS, as_text, best_rows, excerpt


class Table(Experiment):
    name, title = "table", "A table"
    baselines = ("chance",)

    def __init__(self, better: str = "high") -> None:
        self.columns = (Column("x", ("x",), better), Column("longer name", ("y",), "low"))

    def subjects(self) -> list[Subject]:
        raise NotImplementedError

    cells = example = measure = subjects


def line(method: str, value: float, formulation: str = "", row: str = "", model: str = "m") -> Line:
    entries = {"x": Entry(value, value - 1, value + 1), "longer name": Entry(-value, 0, 0)}
    return Line(model, method, formulation, row, 1, 7, entries)


def shuffled(table: list[Line]) -> list[Line]:
    return random.sample(table, len(table))


@pytest.mark.parametrize("better, order", [("high", ["b", "a", "c"]), ("low", ["a", "b", "c"])])
def test_the_best_row_of_each_formulation(better: str, order: list[str]) -> None:
    table = [line("a", 1.0), line("b", 2.0), line("c", math.nan), line("c", math.nan, row="mean")]
    table += [line("b", 3.0 if better == "low" else 1.5, row="layer 1")]
    table += [line("a", 9.0 if better == "low" else -9.0, "variant")]
    found = best_rows(Table(better), shuffled(table))
    plain = [each for each in found if not each.formulation]
    assert [each.method for each in plain] == order
    assert [each.row for each in plain[:2]] == ["", ""]
    assert sum(each.formulation == "variant" for each in found) == 1


def test_baselines_are_shown_wherever_they_are() -> None:
    ranked = [line(f"m{i:02}", float(-i)) for i in range(ROWS + 3)]
    last, first = line("chance", -99.0), line("chance", 99.0, "lucky")
    found = excerpt(Table(), shuffled([*ranked, last, first]))
    assert found == [first, *ranked[: ROWS - 1], last]


def test_where_nothing_is_better_the_means_are_shown() -> None:
    layers = [line("a", float(i), row=f"layer {i}, near") for i in range(ROWS + 5)]
    means = [line("a", 3.0, row="mean, far"), line("a", 4.0, row="mean, near")]
    assert excerpt(Table(better=""), [*layers, *means]) == means
    assert excerpt(Table(better=""), layers) == layers


def test_the_text() -> None:
    table = [
        line("long method", 0.5, row="layer 1"),
        line("a", -0.00001, "f"),
        line("other", math.nan, model="n"),
    ]
    assert as_text(Table(), table).splitlines() == [
        "A table",
        "m, 7 examples",
        "  method       formulation  row      x      longer name",
        "  long method               layer 1  0.500  -0.500",
        "  a            f                     0.000  0.000",
        "n, 7 examples",
        "  method  x  longer name",
        "  other   -  -",
    ]
