"""Answers to texts with one or more passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bench_helpers.task_solvers import Solver

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS
from captum_ssm_bench.experiments.passkeys import (
    FIRST_OF_FOUR,
    FIRST_OF_TWO,
    FOUR,
    LATER_OF_FOUR,
    LATER_OF_TWO,
    ONE,
    TWO,
)
from captum_ssm_bench.tasks.retrieval import IS, ONE_PASSKEY, OWNED, TWO_PASSKEYS, PasskeyTask

RETRIEVAL = EXPERIMENTS["retrieval"]
TASKS = {"passkey-mamba": ONE_PASSKEY, "two-passkeys-mamba2": TWO_PASSKEYS}


@pytest.fixture(params=TASKS)
def learned(request: pytest.FixtureRequest, seed: int) -> tuple[PasskeyTask, Any]:
    """A task, and texts with passkeys of its size."""
    subjects = {subject.name: subject for subject in RETRIEVAL.subjects()}
    return TASKS[request.param], RETRIEVAL.example(subjects[request.param], 3, seed)


def stated(prompt: Sequence[str]) -> dict[str, Sequence[str]]:
    """The passkeys of a prompt by their owners, read off its words."""
    found = {}
    for i in range(len(prompt) - len(OWNED) - 1):
        place = i + len(OWNED)
        if tuple(prompt[i:place]) == OWNED and prompt[place + 1] == IS and "?" in prompt[place:]:
            end = prompt.index(".", place)
            found[prompt[place]] = prompt[place + 2 : end]
    return found


def rows(task: PasskeyTask, example: Any, rule: Any) -> dict[Any, float]:
    model = Solver(task, rule, ends="?", after=5)
    return {
        cell: RETRIEVAL.measure(model, example, cell)[""]["right"] for cell in RETRIEVAL.cells()
    }


def test_who_reads_the_name_answers_all(learned: tuple[PasskeyTask, Any]) -> None:
    assert set(rows(*learned, lambda prompt: stated(prompt)[prompt[-2]]).values()) == {1.0}


def test_who_takes_the_first_passkey_answers_only_those_that_ask_for_it(
    learned: tuple[PasskeyTask, Any],
) -> None:
    task, example = learned
    found = rows(task, example, lambda prompt: next(iter(stated(prompt).values())))
    assert found[ONE] == found[FIRST_OF_TWO] == found[FIRST_OF_FOUR] == 1
    for every, later, keys in ((TWO, LATER_OF_TWO, 2), (FOUR, LATER_OF_FOUR, 4)):
        first, *others = example[keys].input_ids[:, -task.digits :].tolist()
        alike = others.count(first)  # by chance
        assert found[later] == alike / (keys - 1)
        assert found[every] == (1 + alike) / keys


def test_one_wrong_digit_is_a_wrong_answer(learned: tuple[PasskeyTask, Any]) -> None:
    def almost(prompt: Sequence[str]) -> list[str]:
        *right, last = stated(prompt)[prompt[-2]]
        return [*right, "0" if last != "0" else "1"]

    assert set(rows(*learned, almost).values()) == {0.0}


def test_texts_of_an_example_are_equally_long_and_not_those_of_another(
    learned: tuple[PasskeyTask, Any], seed: int
) -> None:
    task, example = learned
    assert len({batch.input_ids.shape[1] for batch in example.values()}) == 1
    subject = next(each for each in RETRIEVAL.subjects() if TASKS.get(each.name) == task)
    again, other = (RETRIEVAL.example(subject, index, seed) for index in (3, 4))
    for keys, batch in example.items():
        assert torch.equal(batch.input_ids, again[keys].input_ids)
        assert not torch.equal(batch.input_ids, other[keys].input_ids)


def test_shipped_models_find_what_they_have_learned(seed: int) -> None:
    for subject in RETRIEVAL.subjects():
        model = subject.load(torch.device("cpu"))
        examples = [RETRIEVAL.example(subject, index, seed) for index in range(8)]
        for cell in (ONE, TWO)[: 1 + subject.name.startswith("two")]:
            right = [RETRIEVAL.measure(model, each, cell)[""]["right"] for each in examples]
            assert sum(right) >= len(examples) - 1, (subject.name, cell)
