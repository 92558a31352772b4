"""The copying task: gold sources, padding, and the check that the gold is the cause."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_ssm.errors import InputError, OptionError
from captum_ssm_bench.tasks import (
    LONG_COPIES,
    SHORT_COPIES,
    CopyBatch,
    CopyingTask,
    copy_accuracy,
    swap_check,
)

TASKS = [SHORT_COPIES, LONG_COPIES, CopyingTask(symbols=2, shortest=1, longest=5)]


class Reader(nn.Module):
    """Predicts the token that stands one length of the string back, give or take a shift."""

    def __init__(self, task: CopyingTask, shift: int = 0) -> None:
        super().__init__()
        self.words, self.shift = len(task.vocabulary), shift
        self.anchor = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.seen.append(len(input_ids))
        ids = zip(input_ids.tolist(), attention_mask.sum(1).tolist(), strict=True)
        found = torch.tensor([self.predict(row, row[-real:]) for row, real in ids])
        return SimpleNamespace(logits=nn.functional.one_hot(found, self.words))

    def predict(self, row: list[int], tokens: list[int]) -> list[int]:
        back = len(tokens) // 2 - self.shift
        return [row[max(i - back, 0)] for i in range(len(row))]


class Induction(Reader):
    """Predicts what follows the first place of the fed token, at the separator the first token."""

    def predict(self, row: list[int], tokens: list[int]) -> list[int]:
        separator = row.index(1)
        before = row[:separator]
        start = len(row) - len(tokens)
        after = [row[before.index(t) + 1] if t in before else 0 for t in row[separator + 1 :]]
        return [*before, row[start], *after]


def _text(batch: CopyBatch, row: int) -> str:
    return batch.task.vocabulary.decode(batch.input_ids[row])


@pytest.mark.parametrize("task", TASKS)
def test_strings_are_those_of_the_task(task: CopyingTask) -> None:
    strings = task.draw(800, seed=random.randrange(10**6))
    assert {len(s) for s in strings} == set(range(task.shortest, task.longest + 1))
    assert len({c for s in strings for c in s}) == task.symbols
    assert any(len(set(s)) < len(s) for s in strings), "symbols repeat"
    assert {len(s) for s in task.draw(9, seed=1, length=7)} == {7}


def test_same_seed_same_strings() -> None:
    seed = random.randrange(10**6)
    assert SHORT_COPIES.draw(20, seed) == SHORT_COPIES.draw(20, seed)
    assert SHORT_COPIES.draw(20, seed) != SHORT_COPIES.draw(20, seed + 1)
    rng = random.Random(seed)
    assert SHORT_COPIES.draw(12, rng) + SHORT_COPIES.draw(8, rng) == SHORT_COPIES.draw(20, seed)


def test_global_random_state_is_left_alone() -> None:
    before = random.getstate(), torch.get_rng_state()
    batch = SHORT_COPIES.batch(SHORT_COPIES.draw(5, seed=0))
    swap_check(Reader(SHORT_COPIES), batch, seed=0)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_batch_by_hand() -> None:
    batch = CopyingTask(symbols=5).batch(["abba", "c"])
    assert _text(batch, 0) == "a b b a | a b b a"
    assert _text(batch, 1) == "<pad> <pad> <pad> <pad> <pad> <pad> c | c"
    assert batch.lengths.tolist() == [4, 1]
    assert batch.attention_mask.tolist() == [[1] * 9, [0] * 6 + [1] * 3]
    rows, queries, sources, tokens = batch.links
    assert rows.tolist() == [0, 0, 0, 0, 1]
    assert queries.tolist() == [4, 5, 6, 7, 7]
    assert sources.tolist() == [0, 1, 2, 3, 6]
    assert tokens.tolist() == [2, 3, 3, 2, 4]


@pytest.mark.parametrize("task", TASKS)
def test_every_copied_token_has_its_source(task: CopyingTask) -> None:
    strings = task.draw(40, seed=random.randrange(10**6))
    batch = task.batch(strings)
    ids = batch.input_ids
    rows, queries, sources, tokens = batch.links
    assert len(rows) == sum(map(len, strings))
    assert torch.equal(ids[rows, queries + 1], tokens)
    assert torch.equal(ids[rows, sources], tokens)
    for row, text in enumerate(strings):
        mine = rows == row
        assert "".join(task.vocabulary.tokens(tokens[mine])) == text
        first = ids.shape[1] - 2 * len(text) - 1
        assert sources[mine].tolist() == list(range(first, first + len(text)))
        assert queries[mine][0] == ids[row].tolist().index(1), "the separator predicts the first"


@pytest.mark.parametrize("diagonals", [1, 3, 5])
def test_gold_is_as_many_diagonals(diagonals: int) -> None:
    batch = LONG_COPIES.batch(LONG_COPIES.draw(6, seed=random.randrange(10**6)))
    gold = batch.gold(diagonals)
    width = batch.input_ids.shape[1]
    for row, n in enumerate(batch.lengths.tolist()):
        for i in range(width):
            for j in range(width):
                k, source = i - (width - n - 1), j - (width - 2 * n - 1)
                within = 0 <= k < n and 0 <= source < n
                assert gold[row, i, j] == (within and 2 * abs(k - source) < diagonals)


def test_the_right_model_copies_and_no_other_token_strays() -> None:
    batch = SHORT_COPIES.batch(SHORT_COPIES.draw(50, seed=random.randrange(10**6)))
    model = Reader(SHORT_COPIES)
    assert copy_accuracy(model, batch, internal_batch_size=16) == (1.0, 1.0)
    assert model.seen == [16, 16, 16, 2]
    assert swap_check(model, batch, seed=1) == (1.0, 0.0)


def test_a_model_that_reads_one_place_off_is_found_out() -> None:
    batch = LONG_COPIES.batch(LONG_COPIES.draw(50, seed=random.randrange(10**6)))
    model = Reader(LONG_COPIES, shift=1)
    accuracy, check = copy_accuracy(model, batch), swap_check(model, batch, seed=1)
    assert 0 < accuracy.tokens < 0.1, "right by chance where a symbol repeats"
    assert accuracy.sequences == 0
    assert check.moved < 0.1
    each = batch.lengths.double()
    # each source but a string's first changes the token before its own
    expected = float((each - 1).sum() / (each * (each - 1)).sum())
    assert check.strayed == pytest.approx(expected)


def test_the_share_of_sequences_counts_whole_strings() -> None:
    task = CopyingTask(symbols=8)
    batch = task.batch(["abcd", "abac", "ha", "hh"])
    # followed by what followed its first occurrence: wrong after the second a, and after h
    accuracy = copy_accuracy(Induction(task), batch)
    assert accuracy.sequences == 3 / 4
    assert accuracy.tokens == 11 / 12


def test_a_model_that_looks_up_the_fed_token_strays() -> None:
    task = CopyingTask(symbols=30)
    batch = task.batch(["".join(random.sample("abcdefghijklmnopqrstuvwxyzABCD", k=12))])
    assert copy_accuracy(Induction(task), batch) == (1.0, 1.0)
    check = swap_check(Induction(task), batch, seed=3)
    # each source but the last is also what the token after it is looked up by, and the symbol
    # put in may hide a later one
    assert check.moved == 1
    assert 11 <= round(check.strayed * 12 * 11) <= 11 + 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"symbols": 1}, "symbols=1"),
        ({"symbols": 63}, "symbols=63"),
        ({"shortest": 0}, "shortest=0"),
        ({"shortest": 9, "longest": 8}, "longest=8"),
    ],
)
def test_impossible_tasks_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CopyingTask(**options)


def test_bad_input_is_named() -> None:
    task = CopyingTask(symbols=4)
    with pytest.raises(InputError, match="strings is empty"):
        task.batch([])
    for text in ("", "abe", "a|b", "a b"):
        with pytest.raises(InputError, match=re.escape(f"{text!r} cannot be copied")):
            task.batch(["abcd", text])
    with pytest.raises(OptionError, match="length=0"):
        task.draw(1, seed=0, length=0)
    batch = task.batch(["abcd"])
    for diagonals in (0, 2, -1):
        with pytest.raises(OptionError, match=f"diagonals={diagonals}"):
            batch.gold(diagonals)
    with pytest.raises(OptionError, match="internal_batch_size=0"):
        copy_accuracy(Reader(task), batch, internal_batch_size=0)
