"""Batches of texts with known sources: ids, padding, links and maps."""

from __future__ import annotations

import random

import pytest
import torch

from captum_ssm.errors import InputError
from captum_ssm_bench.tasks import (
    FREQUENT_WORD,
    LONG_COPIES,
    NUMBER_WORDS,
    PAIRS,
    TWO_PASSKEYS,
    LinkedBatch,
    LinkedTask,
    LinkedText,
    RecallTask,
)

TASKS: list[LinkedTask] = [
    LONG_COPIES,
    NUMBER_WORDS,
    PAIRS,
    TWO_PASSKEYS,
    FREQUENT_WORD,
    RecallTask(),
]

LONG = LinkedText(
    words=("two", "one", "two", "|", "zwei", "ein"),
    answer=4,
    context=range(1, 3),
    sure=((5, 1), (4, 2), (4, 0)),
    possible=((5, 2),),
)
SHORT = LinkedText(words=("one", "eins"), answer=1, context=range(1), sure=())


def _ids(text: str) -> list[int]:
    return NUMBER_WORDS.vocabulary.encode(text)


def test_by_hand() -> None:
    batch = LinkedBatch.of(NUMBER_WORDS, [LONG, SHORT])
    assert batch.input_ids.tolist() == [
        _ids("two one two | zwei ein"),
        _ids("<pad> <pad> <pad> <pad> one eins"),
    ]
    assert batch.attention_mask.tolist() == [[1] * 6, [0] * 4 + [1] * 2]
    assert batch.context.int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]]
    rows, queries, tokens = batch.targets
    assert rows.tolist() == [0, 0, 1]
    assert queries.tolist() == [3, 4, 4]
    assert tokens.tolist() == _ids("zwei ein eins")
    rows, queries, sources, tokens = batch.links
    assert rows.tolist() == [0, 0, 0]
    assert queries.tolist() == [3, 3, 4]
    assert sources.tolist() == [0, 2, 1]
    assert tokens.tolist() == _ids("zwei zwei ein")
    assert [x.tolist() for x in batch.possible_links] == [[0], [4], [2], _ids("ein")]
    assert (LONG.prompt, LONG.completion) == ("two one two |", "zwei ein")


def test_a_batch_without_links() -> None:
    batch = LinkedBatch.of(NUMBER_WORDS, [SHORT, SHORT])
    assert not batch.gold().any() and not batch.possible().any()
    assert {x.dtype for links in (batch.links, batch.possible_links) for x in links} == {torch.long}


@pytest.mark.parametrize("task", TASKS)
def test_maps_are_the_links_one_by_one(task: LinkedTask) -> None:
    batch = task.batch(task.draw(5, random.randrange(10**9)))
    count, width = batch.input_ids.shape
    sure = {tuple(int(x) for x in link[:3]) for link in zip(*batch.links, strict=True)}
    further = {tuple(int(x) for x in link[:3]) for link in zip(*batch.possible_links, strict=True)}
    asked = {(int(r), int(q)) for r, q, _ in zip(*batch.targets, strict=True)}
    assert sure and not sure & further
    maps = (batch.gold(), batch.possible(), batch.pairs())
    for b in range(count):
        for i in range(width):
            for j in range(width):
                gold, possible, pair = (bool(found[b, i, j]) for found in maps)
                assert gold == ((b, i, j) in sure)
                assert possible == ((b, i, j) in sure | further)
                assert pair == ((b, i) in asked and bool(batch.context[b, j]))
    assert not bool((batch.possible() & ~batch.pairs()).any()), "sources lie in the context"


@pytest.mark.parametrize("task", TASKS)
def test_targets_are_the_ends_of_the_texts(task: LinkedTask) -> None:
    batch = task.batch(task.draw(7, random.randrange(10**9)))
    rows, queries, tokens = batch.targets
    assert torch.equal(batch.input_ids[rows, queries + 1], tokens)
    for row in range(7):
        mine = queries[rows == row].tolist()
        width = batch.input_ids.shape[1]
        assert mine == list(range(width - 1 - len(mine), width - 1))
        assert not batch.context[row, mine[0] + 1 :].any()


@pytest.mark.parametrize("task", TASKS)
def test_padding_moves_links_and_changes_nothing_else(task: LinkedTask) -> None:
    examples = task.draw(6, random.randrange(10**9))
    together = task.batch(examples)
    for row, example in enumerate(examples):
        alone = task.batch([example])
        real = together.attention_mask[row].bool()
        shift = int((~real).sum())
        assert torch.equal(together.input_ids[row, shift:], alone.input_ids[0])
        assert bool(alone.attention_mask.all()) and not bool(real[:shift].any())
        for kind in ("gold", "possible", "pairs"):
            found = getattr(together, kind)()[row]
            assert torch.equal(found[shift:, shift:], getattr(alone, kind)()[0])
            assert int(found.sum()) == int(found[shift:, shift:].sum())


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="texts is empty"):
        LinkedBatch.of(NUMBER_WORDS, [])
    with pytest.raises(InputError, match="'three-ish'"):
        LinkedBatch.of(NUMBER_WORDS, [LinkedText(("three-ish", "drei"), 1, range(1), ())])
