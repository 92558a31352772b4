"""How relevance changes each time that a word occurs again."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")

from captum_ssm import LatimNorm
from captum_ssm_bench import EXPERIMENTS, Cell
from captum_ssm_bench.experiments.repeated_words import FIRST, LAST, OCCURRENCES, by_occurrence
from captum_ssm_bench.tasks import FREQUENT_WORD

REPEATED = EXPERIMENTS["repeated-words"]


def values(relevance: torch.Tensor) -> dict[str, float]:
    return {row: numbers["multiple"] for row, numbers in by_occurrence(relevance).items()}


def test_multiples_of_the_mean() -> None:
    found = values(torch.tensor([4.0, -3.0, 2.0, 1.0, 1.0, -1.0, 2.0]))
    assert found["occurrence 1"] == 2 and found["occurrence 2"] == 1.5
    assert found["occurrence 7"] == 1 and found[FIRST] == 1.75
    assert found[LAST] == 0.75


def test_a_constant_has_no_decay_and_nothing_has_no_number() -> None:
    assert set(values(torch.full((5,), 0.3, dtype=torch.float64)).values()) == {1.0}
    assert all(math.isnan(value) for value in values(torch.zeros(4)).values())
    assert list(values(torch.ones(1))) == ["occurrence 1", FIRST, LAST]


def test_the_occurrences_of_an_example(seed: int) -> None:
    subject = REPEATED.subjects()[0]
    given = REPEATED.example(subject, 1, seed)
    query, token = given.target
    words = given.ids[0].tolist()
    assert words[query + 1] == token and query == len(words) - 2
    assert given.places == [i for i, word in enumerate(words[: query + 1]) if word == token]
    assert FREQUENT_WORD.vocabulary.tokens([words[query]]) == ["is"]


def test_the_map_is_read_at_the_occurrences(seed: int) -> None:
    subject = REPEATED.subjects()[1]
    model, given = subject.load(torch.device("cpu")), REPEATED.example(subject, 0, seed)
    found = REPEATED.measure(model, given, Cell("LatimNorm l2", "silu"))
    (only,) = LatimNorm(model, activation="silu").maps(given.ids, positions=[given.target[0]])
    at = only[0, 0, given.places]
    assert len(found) == OCCURRENCES + 2 <= len(at) + 2
    for i, value in enumerate((at / at.mean()).tolist()[:OCCURRENCES], 1):
        assert found[f"occurrence {i}"]["multiple"] == pytest.approx(value, rel=1e-5)


def test_every_cell_has_its_numbers(seed: int) -> None:
    for subject in REPEATED.subjects():
        model, given = subject.load(torch.device("cpu")), REPEATED.example(subject, 0, seed)
        for cell in REPEATED.cells():
            rows = REPEATED.measure(model, given, cell)
            assert len(rows) == OCCURRENCES + 2
            assert all(math.isfinite(numbers["multiple"]) for numbers in rows.values()), cell
