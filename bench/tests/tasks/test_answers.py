"""How much is answered right, and whether answers follow their sources, on rules known by heart."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from bench_helpers.task_solvers import Rule, Solver

from captum_ssm.errors import InputError
from captum_ssm_bench.tasks import (
    NUMBER_WORDS,
    LinkedBatch,
    LinkedText,
    PasskeyTask,
    answer_accuracy,
    swap_check,
)

TASK = PasskeyTask(digits=4)


def _passkey(prompt: Sequence[str]) -> Sequence[str]:
    return [word for word in prompt if word.isdigit()]


def _all_alike(prompt: Sequence[str]) -> Sequence[str]:
    """The first digit four times: each digit follows from the first."""
    return [_passkey(prompt)[0]] * 4


def _solver(rule: Rule) -> Solver:
    return Solver(TASK, rule, ends="?", after=5)


def _batch(*passkeys: str) -> LinkedBatch:
    texts = []
    for passkey in passkeys:
        words = ("the", "passkey", "of", "anna", "is", *passkey, ".")
        question = ("?", "the", "passkey", "of", "anna", "is")
        answer = len(words) + len(question)
        texts.append(
            LinkedText(
                (*words, *question, *passkey),
                answer,
                range(len(words)),
                tuple((answer + i, 5 + i) for i in range(4)),
            )
        )
    return TASK.batch(texts)


def test_shares_of_tokens_and_of_sequences() -> None:
    batch = _batch("1111", "2272", "4567")
    assert answer_accuracy(_solver(_all_alike), batch) == ((4 + 3 + 1) / 12, 1 / 3)
    assert answer_accuracy(_solver(_passkey), batch) == (1, 1)


def _told_by_the_first(prompt: Sequence[str]) -> Sequence[str]:
    """The first digit, and three times a word that depends on it and is no digit."""
    first = _passkey(prompt)[0]
    return [first, *[TASK.vocabulary.vocab[-1 - int(first)]] * 3]


def test_what_moves_and_what_strays() -> None:
    """The first digit moves its own token and three others; no other digit moves any."""
    batch = _batch("1234", "5566")
    check = swap_check(_solver(_told_by_the_first), batch, random.randrange(10**6))
    assert check == (1 / 4, 3 / 12)
    assert swap_check(_solver(_passkey), _batch("1234", "5566"), 0) == (1, 0)


def test_all_sources_of_a_token_are_exchanged_together() -> None:
    text = LinkedText(
        ("three", "three", "|", "drei"), 3, range(2), sure=((3, 0), (3, 1)), possible=()
    )
    batch = LinkedBatch.of(NUMBER_WORDS, [text])

    def rule(prompt: Sequence[str]) -> Sequence[str]:
        german = dict(NUMBER_WORDS.families[0])
        return [german[prompt[0]] if prompt[0] == prompt[1] else "und"]

    check = swap_check(Solver(NUMBER_WORDS, rule, ends="|"), batch, random.randrange(10**6))
    assert check.moved == 1
    assert math.isnan(check.strayed), "there is no other token"


def test_a_batch_without_families_is_named() -> None:
    with pytest.raises(InputError, match="no source that a family"):
        swap_check(Solver(NUMBER_WORDS, _passkey, ends="|"), NUMBER_WORDS.batch([1]), 0)
