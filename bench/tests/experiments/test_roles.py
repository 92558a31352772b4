"""The tokens that ask, are matched and are answered, counted."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm import LatimFlow
from captum_ssm.models.recall import parse_prompt
from captum_ssm_bench import EXPERIMENTS, Cell
from captum_ssm_bench.experiments.roles import (
    CHANCE,
    LOST,
    TOLD,
    first_is_right,
    right_tokens,
)
from captum_ssm_bench.tasks import PairsTask, PasskeyTask, RecallTask
from captum_ssm_bench.tasks.linked import LinkedBatch

ROLES = EXPERIMENTS["roles"]


def words_of(batch: LinkedBatch, role: str) -> list[list[str]]:
    """For each answered word, the right ones of a role, each with its place."""
    told = batch.task.vocabulary.tokens(batch.input_ids[0])
    right = right_tokens(batch)[role]
    return [[f"{told[place]} {place}" for place in row.nonzero().flatten()] for row in right]


def test_who_owns_it_is_matched_and_who_is_asked_for_asks() -> None:
    text = "dora owns the kite . today anna owns the red lamp . ? anna owns the"
    batch = RecallTask().batch([parse_prompt(text)])
    assert words_of(batch, "content") == [["lamp 10"]]
    assert words_of(batch, "key") == [["anna 6"]]
    assert words_of(batch, "query") == [["anna 13"]]


def test_the_key_of_a_pair_is_matched_and_the_last_one_asks() -> None:
    task = PairsTask()
    batch = task.batch(task.draw(1, seed=0, length=3))  # m A p P g H p -> P
    assert words_of(batch, "content") == [["P 3"]]
    assert words_of(batch, "key") == [["p 2"]]
    assert words_of(batch, "query") == [["p 6"]]


def test_a_digit_is_told_by_what_stands_before_it(seed: int) -> None:
    task = PasskeyTask(keys=2, digits=2)
    (text,) = task.draw(1, seed)
    batch = task.batch([text])
    *_, name, _, _, _ = text.words
    owner, ask = text.words.index(name), text.words.index("?")
    statement = [f"{text.words[i]} {i}" for i in range(owner - 3, owner + 4)]
    question = [f"{text.words[i]} {i}" for i in range(ask, len(text.words) - 1)]
    assert [word.split()[0] for word in statement[:5]] == ["the", "passkey", "of", name, "is"]
    assert words_of(batch, "content") == [[statement[5]], [statement[6]]]
    assert words_of(batch, "key") == [statement[:5], statement[:6]]
    assert words_of(batch, "query") == [question[:-1], question]


def test_the_most_relevant_token_counts_whatever_is_least() -> None:
    relevance = torch.tensor([[-9.0, 1.0, 2.0], [-9.0, 1.0, 2.0]])
    right = torch.tensor([[True, False, False], [False, True, True]])
    assert first_is_right(relevance, right) == 0.5


def test_numbers_are_those_of_the_method(seed: int) -> None:
    (subject,) = (each for each in ROLES.subjects() if each.name == "two-passkeys-mamba2")
    model, example = subject.load(torch.device("cpu")), ROLES.example(subject, 2, seed)
    with ROLES.together():
        found = {cell: ROLES.measure(model, example, cell)[""] for cell in ROLES.cells()}
    flow = LatimFlow(model, rule="centered")
    parts = [flow.decompose(example.ids, target) for target in example.targets]
    for role in TOLD:
        right = 0.0
        for part, row in zip(parts, example.right[role], strict=True):
            assert part.roles is not None
            right += float(row[part.roles[role][0].argmax()])
        assert found[Cell("LatimFlow", "centered")][role] == right / len(parts)
    frozen = found[Cell("LatimFlow", "frozen")]
    assert frozen["content"] in (0, 0.5, 1)
    assert math.isnan(frozen["key"]) and math.isnan(frozen["query"])
    assert found[LOST]["content"] > 0.5, "a digit is copied, whatever it is"
    length = example.ids.shape[1]
    assert found[CHANCE]["content"] == pytest.approx((1 / (length - 2) + 1 / (length - 1)) / 2)
