"""Tables: lines of models and groups, paired gains, and how they are shown."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_helpers.tables import read_table
from torch import Tensor

from captum_ssm.errors import InputError, OptionError
from captum_ssm.metrics import Sample
from captum_ssm.metrics.sample import mean
from captum_ssm_bench import (
    Cell,
    Column,
    Entry,
    Experiment,
    Key,
    Line,
    Rows,
    Side,
    lines,
    write_table,
)
from captum_ssm_bench.harness.statistics import interval, ratio
from captum_ssm_bench.harness.tables import SHOWN, gain_lines, group_lines, shown

Result = tuple[Key, Rows]
A, B = Side("a"), Side("b", "half")


class Table(Experiment):
    """Rows a and b of three models, two of which are a group."""

    name, title = "table", "A table"
    baselines = ("chance",)
    groups = {"pair": ("m", "n"), "nobody": ("q",)}  # noqa: RUF012

    def __init__(self, better: str = "high") -> None:
        self.columns = (
            Column("x", ("x",), better),
            Column("error", ("x",), "low"),
            Column("ratio", ("x", "y"), "", ratio),
        )

    def subjects(self) -> Any:
        raise NotImplementedError

    cells = example = measure = subjects


def results(
    value: Callable[[str, str, int], float],
    models: Sequence[str] = ("m",),
    sides: Sequence[Side] = (A, B),
    examples: int = 12,
) -> list[Result]:
    return [
        (
            Key("table", model, *side[:2], seed=0, example=i),
            {side.row: {"x": x, "y": math.nan if math.isnan(x) else 2.0}},
        )
        for side in sides
        for model in models
        for i in range(examples)
        for x in [value(side.method, model, i)]
    ]


# --- intervals -------------------------------------------------------------------------------


def test_one_model_has_the_interval_of_a_sample() -> None:
    """But for the draws, which are others."""
    rows = torch.rand(60, 2) + 0.5
    sample = Sample(ratio)
    sample.update(rows)
    one, other = interval(ratio, [rows]), sample.interval(resamples=4000, seed=1)
    width = float(other.high - other.low)
    assert float(one.value) == pytest.approx(float(other.value), rel=1e-12)
    assert float(one.low) == pytest.approx(float(other.low), abs=0.15 * width)
    assert float(one.high) == pytest.approx(float(other.high), abs=0.15 * width)


def test_several_models_against_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [rng.normal(shift, 1.0, size=(size, 1)) for shift, size in ((0, 40), (3, 7), (9, 20))]
    drawn = [np.mean([m[rng.integers(len(m), size=len(m))].mean() for m in models])
             for _ in range(4000)]  # fmt: skip
    low, value, high = (float(x) for x in interval(mean, list(map(torch.tensor, models))))
    assert value == pytest.approx(np.mean([m.mean() for m in models]))
    width = np.std(drawn)
    assert low == pytest.approx(np.quantile(drawn, 0.025), abs=0.3 * width)
    assert high == pytest.approx(np.quantile(drawn, 0.975), abs=0.3 * width)


def test_numbers_that_an_example_lacks_do_not_count() -> None:
    nan = float("nan")
    found = interval(mean, [torch.tensor([[2.0], [nan]]), torch.tensor([[nan], [2.0]])])
    assert [float(x) for x in found] == [2.0, 2.0, 2.0]
    assert float(interval(mean, [torch.full((4, 1), nan), torch.ones(4, 1)]).value) == 1.0


@pytest.mark.parametrize("models", [[], [torch.rand(3, 1), torch.rand(0, 1)]])
def test_nothing_to_draw(models: list[Tensor]) -> None:
    with pytest.raises(InputError, match="one or more examples of each model"):
        interval(mean, models)


def test_an_interval_over_models_draws_models() -> None:
    models = [torch.full((3, 1), float(x)) for x in range(9)]
    models.append(torch.full((3, 1), float("nan")))  # which does not count
    found = interval(mean, models, over_models=True)
    spread = 1.96 * np.std(range(9)) / 3
    assert float(found.value) == 4.0
    assert float(found.high - found.low) == pytest.approx(2 * spread, rel=0.15)
    assert float(interval(mean, models).high) == 4.0, "examples of a model are all alike"


# --- groups and gains ------------------------------------------------------------------------


def test_a_group_is_the_mean_of_its_models_however_many_examples_each_has() -> None:
    found = results(lambda a, m, i: {"m": 1.0, "n": 4.0}.get(m, 99.0), "mno")
    found += results(lambda a, m, i: 1.0, ["m"], examples=62)
    table = group_lines(Table(), found)
    assert [line[:4] for line in table] == [
        ("pair (2 models)", "a", "", ""),
        ("pair (2 models)", "b", "half", ""),
    ]
    for line in table:
        assert line.examples == 74
        assert line.entries["x"] == pytest.approx((2.5, 2.5, 2.5))
        assert line.entries["ratio"].value == pytest.approx((0.5 + 2) / 2)


def test_a_group_has_an_interval_over_models_if_it_is_named() -> None:
    found, table = results(lambda a, m, i: {"m": 1.0, "n": 4.0}[m], "mn"), Table()
    table.over_models = ("pair",)
    assert {line.entries["x"] for line in group_lines(table, found)} == {(2.5, 1.0, 4.0)}


def test_a_row_that_one_model_lacks_is_left_out() -> None:
    found = results(lambda a, m, i: 1.0, "mno")
    found = [each for each in found if (each[0].method, each[0].model) != ("b", "n")]
    assert [line.method for line in group_lines(Table(), found)] == ["a"]
    alone = [each for each in found if each[0].model == "m"]
    assert {line.model for line in group_lines(Table(), alone)} == {"pair (1 model)"}


def test_gains_are_of_the_same_examples() -> None:
    def value(method: str, model: str, i: int) -> float:
        if (method, i) == ("a", 0):
            return math.nan  # and the number of b there does not count
        return 10.0 * i + (method == "b") * (1 if model == "m" else 3)

    held, table = gain_lines(Table(), results(value, "mno"), Cell("a"))
    assert held.title == "A table: gain over a" and held.name == "table-against"
    assert [column.better for column in held.columns] == ["high", "high", ""]
    assert [line.model for line in table] == ["pair (2 models)", "m", "n", "o"]
    for line, gain in zip(table, (2.0, 1.0, 3.0, 3.0), strict=True):
        assert line[1:4] == ("b", "half", "")
        assert line.entries["x"] == pytest.approx((gain, gain, gain)), "the rest is shared"
        assert line.entries["error"].value == pytest.approx(-gain)
        assert line.entries["ratio"].value == pytest.approx(gain / 2)
    few = results(lambda a, m, i: float(i if a == "a" else i + 1))[:14]  # two examples of b
    _, (line, _) = gain_lines(Table(), few, Cell("a"))
    assert line.examples == 2 and line.entries["x"].value == pytest.approx(1)


def test_a_row_that_was_not_measured_cannot_be_held_against() -> None:
    with pytest.raises(OptionError, match=r"against='c' was not measured. Use one of: a; b, half"):
        gain_lines(Table(), results(lambda a, m, i: random.random()), Cell("c"))


# --- what is shown ---------------------------------------------------------------------------


def line(method: str, value: float, formulation: str = "", row: str = "", model: str = "m") -> Line:
    entries = {
        "x": Entry(value, value - 1, value + 1),
        "error": Entry(-value, 0, 0),
        "ratio": Entry(math.nan, math.nan, math.nan),
    }
    return Line(model, method, formulation, row, 7, entries)


@pytest.mark.parametrize("better, order", [("high", ["b", "a", "c"]), ("low", ["a", "b", "c"])])
def test_the_best_row_of_each_formulation_is_shown(better: str, order: list[str]) -> None:
    table = [line("a", 1.0), line("b", 2.0), line("c", math.nan), line("c", math.nan, row="mean")]
    table += [line("b", 3.0 if better == "low" else 1.5, row="layer 1")]
    table += [line("a", 9.0 if better == "low" else -9.0, "variant")]
    found = shown(Table(better), random.sample(table, len(table)))
    plain = [each for each in found if not each.formulation]
    assert [each.method for each in plain] == order
    assert [each.row for each in plain[:2]] == ["", ""]
    assert sum(each.formulation == "variant" for each in found) == 1


def test_baselines_are_shown_wherever_they_are() -> None:
    ranked = [line(f"m{i:02}", float(-i)) for i in range(SHOWN + 3)]
    last, first = line("chance", -99.0), line("chance", 99.0, "lucky")
    assert shown(Table(), [last, *ranked, first]) == [first, *ranked[: SHOWN - 1], last]
    layers = [line("a", float(i), row=f"layer {i}, near") for i in range(SHOWN + 5)]
    means = [line("a", 3.0, row="mean, far"), line("a", 4.0, row="mean, near")]
    assert shown(Table(better=""), [*layers, *means]) == means
    assert shown(Table(better=""), layers) == layers


def test_the_file(tmp_path: Path) -> None:
    table = lines(Table(), results(lambda a, m, i: float(i + (a == "b")), ("m", "n")))
    assert write_table(Table(), table, tmp_path) == tmp_path / "table.csv"
    written = read_table(tmp_path, "table")
    assert [(row["model"], row["method"]) for row in written] == [tuple(t[:2]) for t in table]
    assert written[1]["x"] == pytest.approx(6.5) and written[1]["ratio low"] > 0
