"""Groups count models alike, and gains are paired."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from captum_ssm.errors import OptionError
from captum_ssm_bench import Cell, Column, Experiment, Key, Rows, Side, Subject
from captum_ssm_bench.harness.groups import differences, group_lines

A, B = Side("a"), Side("b", "half")


class Grouped(Experiment):
    """Rows a and b of three models, two of which are a group."""

    name, title = "grouped", "A table"
    columns = (
        Column("x", ("x",)),
        Column("error", ("x",), "low"),
        Column("ratio", ("x", "y"), "", lambda sums, _: sums[..., :1] / sums[..., 1:]),
    )
    groups = {"pair": ("m", "n"), "nobody": ("q",)}  # noqa: RUF012

    def subjects(self) -> Sequence[Subject]:
        return [Subject(name, lambda device: nn.Linear(1, 1), name) for name in "mno"]

    def cells(self) -> Sequence[Cell]:
        return [Cell("a"), Cell("b", "half")]

    def example(self, subject: Subject, index: int, seed: int) -> Any:
        return index

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        return {}


def results(
    value: Callable[[str, str, int], float], models: Sequence[str] = "mno", examples: int = 6
) -> list[tuple[Key, Rows]]:
    return [
        (
            Key("grouped", model, *side[:2], seed=0, example=i),
            {"": {"x": x, "y": math.nan if math.isnan(x) else 2.0}},
        )
        for side in (A, B)
        for model in models
        for i in range(examples)
        for x in [value(side.method, model, i)]
    ]


def test_a_group_is_the_mean_of_its_models_however_many_examples_each_has() -> None:
    found = results(lambda a, m, i: {"m": 1.0, "n": 4.0}.get(m, 99.0))
    found += results(lambda a, m, i: 1.0, ["m@1"], examples=50)
    lines = group_lines(Grouped(), found)
    assert [(line.model, line.method, line.formulation) for line in lines] == [
        ("pair (2 models)", "a", ""),
        ("pair (2 models)", "b", "half"),
    ]
    for line in lines:
        assert (line.trainings, line.examples) == (2, 62)
        assert line.entries["x"].value == pytest.approx(2.5)
        assert line.entries["ratio"].value == pytest.approx((0.5 + 2) / 2)
        assert (line.entries["x"].low, line.entries["x"].high) == pytest.approx((2.5, 2.5))


def test_a_row_that_one_model_lacks_is_left_out() -> None:
    found = [
        (key, rows)
        for key, rows in results(lambda a, m, i: 1.0)
        if (key.method, key.model) != ("b", "n")
    ]
    assert [line.method for line in group_lines(Grouped(), found)] == ["a"]
    alone = [each for each in found if each[0].model == "m"]
    assert {line.model for line in group_lines(Grouped(), alone)} == {"pair (1 model)"}


def test_gains_are_of_the_same_examples() -> None:
    def value(method: str, model: str, i: int) -> float:
        if (method, i) == ("a", 0):
            return math.nan  # and what b has there does not count
        return 10.0 * i + (method == "b") * (1 if model == "m" else 3)

    held, lines = differences(Grouped(), results(value), A)
    assert held.title == "A table: gain over a" and held.name == "grouped-against"
    assert [column.better for column in held.columns] == ["high", "high", ""]
    assert [line.model for line in lines] == ["pair (2 models)", "m", "n", "o"]
    for line, gain in zip(lines, (2.0, 1.0, 3.0, 3.0), strict=True):
        assert (line.method, line.formulation) == B[:2]
        assert line.entries["x"].value == pytest.approx(gain)
        assert line.entries["error"].value == pytest.approx(-gain)
        assert line.entries["ratio"].value == pytest.approx(gain / 2)
        bounds = line.entries["x"].low, line.entries["x"].high
        assert bounds == pytest.approx((gain, gain)), "what varies is what both share"


def test_examples_that_only_one_row_has_are_left_out() -> None:
    found = results(lambda a, m, i: float(i if a == "a" else i + 1), "m", examples=5)
    _, (line, _) = differences(Grouped(), found[:7], A)  # two examples of b
    assert line.examples == 2 and line.entries["x"].value == pytest.approx(1)


def test_a_row_that_was_not_measured_cannot_be_held_against() -> None:
    with pytest.raises(OptionError, match=r"against='c' was not measured. Use one of: a; b, half"):
        differences(Grouped(), results(lambda a, m, i: torch.rand(()).item()), Side("c"))
