"""Pairs of a key and a value: the texts, and their sources."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_ssm.errors import OptionError
from captum_ssm_bench.tasks import FEW_PAIRS, PAIRS, PairsTask, answer_accuracy, swap_check


@pytest.mark.parametrize("task", [PAIRS, FEW_PAIRS, PairsTask(2, 2, 2)])
def test_the_answer_stands_behind_the_key_that_asks(task: PairsTask, seed: int) -> None:
    for text in task.draw(50, seed):
        *stated, asking = text.words[: text.answer]
        keys, values = stated[::2], stated[1::2]
        assert task.shortest <= len(keys) <= task.longest and len(set(keys)) == len(keys)
        assert all(word.islower() for word in keys) and all(word.isupper() for word in values)
        place = keys.index(asking)
        assert text.words[text.answer :] == (values[place],)
        assert text.sure == ((text.answer, 2 * place + 1),)
        assert text.possible == ((text.answer, 2 * place),)
        assert text.context == range(len(stated))
        task.vocabulary.encode(" ".join(text.words))


def test_lengths_and_seeds(seed: int) -> None:
    lengths = {len(text.words) for text in PAIRS.draw(200, seed)}
    assert lengths == {2 * n + 2 for n in range(1, 7)}
    assert {len(text.words) for text in PAIRS.draw(20, seed, length=9)} == {20}
    assert PAIRS.draw(5, seed) == PAIRS.draw(5, seed) != PAIRS.draw(5, seed + 1)


class Lookup(nn.Module):
    """Predicts what follows the first place of the fed token, or what follows that."""

    def __init__(self, behind: int) -> None:
        super().__init__()
        self.anchor, self.behind = nn.Parameter(torch.zeros(1)), behind

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        rows = input_ids.tolist()
        found = [[row[(row.index(t) + self.behind) % len(row)] for t in row] for row in rows]
        words = len(PAIRS.vocabulary)
        return SimpleNamespace(logits=nn.functional.one_hot(torch.tensor(found), words))


def test_who_looks_the_key_up_is_right(seed: int) -> None:
    batch = PAIRS.batch(PAIRS.draw(30, seed))
    assert answer_accuracy(Lookup(1), batch).sequences == 1
    assert answer_accuracy(Lookup(2), batch).sequences < 0.5
    exchanged = swap_check(Lookup(1), batch, seed)
    assert exchanged.moved == 1 and math.isnan(exchanged.strayed)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 1, 1), "symbols=1: use 2 to 26"),
        ((27, 1, 6), "symbols=27: use 2 to 26"),
        ((8, 0, 6), "shortest=0, longest=6"),
        ((8, 4, 3), "shortest=4, longest=3"),
        ((8, 1, 9), "shortest=1, longest=9.*there are 8 keys"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PairsTask(*sizes)


@pytest.mark.parametrize("length", [0, 17])
def test_wrong_lengths(length: int) -> None:
    with pytest.raises(OptionError, match=f"length={length}: use 1 to 16"):
        PAIRS.draw(1, 0, length)
