"""Comparisons of two rows of a table, decided from paired differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from captum_ssm.errors import OptionError
from captum_ssm_bench import EXPERIMENTS, Cell, Column, Experiment, Key, Rows, Subject
from captum_ssm_bench.harness.verdicts import (
    BEST,
    Comparison,
    Outcome,
    Side,
    Verdict,
    stated,
    verdicts,
)
from captum_ssm_bench.published.beyond import BEYOND
from captum_ssm_bench.published.on_images import IMAGES, VIM, VIT
from captum_ssm_bench.published.on_texts import RWKV, TEXTS
from captum_ssm_bench.published.on_tokens import MAMBA, MAMBA2, TOKENS

A, B = Side("a"), Side("b")
Result = tuple[Key, Rows]


class Table(Experiment):
    name, title = "table", "A table"
    columns = (
        Column("x", ("x",)),
        Column("error", ("x",), "low"),
        Column("neither", ("x",), ""),
        Column("ratio", ("x", "y"), statistic=lambda s, _: s[..., :1] / s[..., 1:]),
    )

    def subjects(self) -> list[Subject]:
        raise NotImplementedError

    cells = example = measure = subjects


def results(
    value: Callable[[str, int], float],
    models: tuple[str, ...] = ("m",),
    examples: int = 12,
    row: str = "",
) -> list[Result]:
    return [
        (
            Key("table", model, side.method, "", 0, i),
            {row: {"x": value(side.method, i), "y": float(1 + i)}},
        )
        for model in models
        for side in (A, B)
        for i in range(examples)
    ]


def said(column: str = "x", better: Side = A, worse: Side = B, models: str = "") -> Comparison:
    return Comparison("table", column, better, worse, "nobody", models=models)


def only(found: list[Result], comparison: Comparison) -> Verdict:
    (verdict,) = verdicts(Table(), found, [comparison])
    return verdict


def test_a_small_gain_that_all_examples_share() -> None:
    """Unpaired, the spread of the examples would hide it."""
    noise = [random.gauss(0, 100) for _ in range(12)]
    found = results(lambda method, i: noise[i] + (0.1 if method == "a" else 0.0))
    verdict = only(found, said())
    assert verdict.outcome is Outcome.CONFIRMED and verdict.examples == 12
    assert verdict.gain.value == pytest.approx(0.1)
    assert only(found, said("error")).outcome is Outcome.REFUTED
    assert only(found, said("error")).gain.value == pytest.approx(-0.1)
    assert only(found, said("neither")).gain.value == pytest.approx(0.1)
    assert only(found, said(better=B, worse=A)).outcome is Outcome.REFUTED


def test_gains_of_both_signs_leave_it_open() -> None:
    found = results(lambda method, i: (-1.0) ** i if method == "a" else 0.0)
    verdict = only(found, said())
    assert verdict.outcome is Outcome.OPEN
    assert verdict.gain.low < 0 < verdict.gain.high
    assert only(results(lambda method, i: float(i)), said()).outcome is Outcome.OPEN


def test_a_ratio_of_sums() -> None:
    found = results(lambda method, i: (2.0 if method == "a" else 1.0) * (1 + i))
    verdict = only(found, said("ratio"))
    assert verdict.gain.value == pytest.approx(1) and verdict.outcome is Outcome.CONFIRMED


def test_what_is_not_measured() -> None:
    found = results(lambda method, i: 1.0)
    assert only(found, said(worse=Side("c"))).outcome is Outcome.MISSING
    nothing = results(lambda method, i: math.nan)
    assert only(nothing, said()).outcome is Outcome.MISSING
    assert verdicts(Table(), found, [said(models="-other")]) == []
    elsewhere = Comparison("another", "x", A, B, "nobody")
    assert verdicts(Table(), found, [elsewhere]) == []


def test_an_example_without_one_of_the_numbers_does_not_count() -> None:
    found = results(lambda m, i: math.nan if (m, i) == ("b", 3) else (9.0 if i == 3 else m == "a"))
    assert only(found, said()).gain.value == pytest.approx(1)


def test_each_model_has_a_verdict_and_trainings_of_one_have_one_together() -> None:
    found = results(lambda m, i: float(m == "a"), ("m", "m@1", "n"))
    both = verdicts(Table(), found, [said()])
    assert [(v.model, v.examples) for v in both] == [("m", 24), ("n", 12)]


def test_trainings_that_disagree_leave_it_open() -> None:
    found = results(lambda m, i: 1.0 if m == "a" else 0.0, ("m",))
    found += results(lambda m, i: 0.0 if m == "a" else 1.0, ("m@1",))
    assert only(found, said()).outcome is Outcome.OPEN


def test_the_best_layer_is_chosen_on_other_examples() -> None:
    """In even examples layer 0 is the best, in odd ones the worst."""
    layers = [
        (key, {"layer 0": rows[""], "layer 1": {"x": 0.5, "y": 1.0}, "mean": {"x": 99.0, "y": 1.0}})
        for key, rows in results(lambda m, i: float(i % 2 == 0))
        if key.method == "a"
    ]
    plain = [each for each in results(lambda m, i: 0.25) if each[0].method == "b"]
    verdict = only(layers + plain, said(better=Side("a", "", BEST)))
    assert verdict.examples == 6
    assert verdict.gain.value == pytest.approx(-0.25) and verdict.outcome is Outcome.REFUTED
    lowest = only(layers + plain, said("error", better=Side("a", "", BEST)))
    assert lowest.gain.value == pytest.approx(0.25 - 0.5)


def test_each_training_has_a_best_layer_of_its_own() -> None:
    layers = [
        (key, {f"layer {n}": {"x": float(n == (key.model == "m")), "y": 1.0} for n in range(2)})
        for key, _ in results(lambda m, i: 0.0, ("m", "m@1"))
        if key.method == "a"
    ]
    plain = [each for each in results(lambda m, i: 0.5, ("m", "m@1")) if each[0].method == "b"]
    verdict = only(layers + plain, said(better=Side("a", "", BEST)))
    assert verdict.gain.value == pytest.approx(0.5) and verdict.examples == 12


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"has no column 'z'. Use one of \['x'"):
        verdicts(Table(), results(lambda m, i: 1.0), [said("z")])


def test_a_table_states_each_of_its_columns() -> None:
    numbers = {A: (0.5, "0.1-0.2"), B: (0.4, "0.3")}
    found = list(stated("table", "T", ("x", "error"), numbers, [(A, B)], "-mamba"))
    assert [(c.column, c.published) for c in found] == [
        ("x", "0.50 against 0.40"),
        ("error", "0.1-0.2 against 0.3"),
    ]
    assert {(c.better, c.worse, c.source, c.models) for c in found} == {(A, B, "T", "-mamba")}


@pytest.mark.parametrize("comparisons", [TOKENS, TEXTS, IMAGES, BEYOND])
def test_all_comparisons_are_of_rows_and_columns_that_are_there(
    comparisons: tuple[Comparison, ...],
) -> None:
    cells = {name: set(experiment.cells()) for name, experiment in EXPERIMENTS.items()}
    for comparison in comparisons:
        experiment = EXPERIMENTS[comparison.experiment]
        assert comparison.column in [column.name for column in experiment.columns]
        for side in (comparison.better, comparison.worse):
            assert Cell(*side[:2]) in cells[experiment.name], side
        assert comparison.models in ("", MAMBA, MAMBA2, RWKV, VIM, VIT, f"{VIM}-first")


@pytest.mark.parametrize("comparisons", [TOKENS, TEXTS, IMAGES, BEYOND])
def test_nothing_is_said_twice(comparisons: tuple[Comparison, ...]) -> None:
    assert len(set(comparisons)) == len(comparisons)


def test_published_numbers_are_on_the_side_that_is_said() -> None:
    for comparison in (*TOKENS, *TEXTS, *IMAGES):
        parts = comparison.published.split(" against ")
        if len(parts) == 2 and all(part.replace(".", "").isdigit() for part in parts):
            columns = {c.name: c for c in EXPERIMENTS[comparison.experiment].columns}
            high, low = map(float, parts)
            assert (high > low) == (columns[comparison.column].better == "high"), comparison
