"""Facts that link one symbol to the next, and the chains that they make."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_ssm.errors import OptionError
from captum_ssm_bench.tasks import CHAINS, ChainsTask, answer_accuracy, swap_check
from captum_ssm_bench.tasks.linked import LinkedText


def facts_of(text: LinkedText) -> dict[str, str]:
    """What each left side is linked to, read off the words before the first question."""
    stated = text.prompt.split(" ? ")[0].split()
    assert stated[2::3] == ["."] * (len(stated) // 3)
    found = dict(zip(stated[::3], stated[1::3], strict=True))
    assert len(found) == len(stated) // 3, "no symbol is linked twice"
    return found


@pytest.mark.parametrize("task", [CHAINS, ChainsTask(26, 9, 16), ChainsTask(4, 3, 3)])
def test_the_answer_follows_the_links(task: ChainsTask, seed: int) -> None:
    for text in task.draw(50, seed):
        facts = facts_of(text)
        assert task.shortest <= len(facts) <= task.longest
        assert text.context == range(3 * len(facts))
        chain = [text.words[text.answer - 1]]
        while chain[-1] in facts:
            chain.append(facts[chain[-1]])
        assert text.completion.split() == chain[1:] and len(chain) == 4
        for (to, source), (_, key), left in zip(text.sure, text.possible, chain, strict=False):
            assert text.words[to] == text.words[source] and source == key + 1
            assert text.words[key] == left
        task.vocabulary.encode(" ".join(text.words))


def test_as_many_chains_as_there_are_facts_for(seed: int) -> None:
    for length, chains in ((3, 1), (5, 1), (6, 2), (8, 2), (9, 3)):
        for text in CHAINS.draw(20, seed, length):
            facts = facts_of(text)
            roots = [a for a in facts if a not in facts.values() and facts[a] in facts]
            assert len(facts) == length and len(roots) == chains
            assert len({*facts, *facts.values()}) == length + chains + length % 3


def test_all_chains_asked_for_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    one, two = CHAINS.questions(rng, 7)
    facts = facts_of(two)
    assert two.words[: len(one.words)] == one.words and facts == facts_of(one)
    asks, root, *chain = two.words[len(one.words) :]
    assert asks == "?" and two.completion.split() == chain
    assert [facts[left] for left in (root, *chain[:2])] == chain
    assert {source // 3 for _, source in one.sure}.isdisjoint({s // 3 for _, s in two.sure})
    assert CHAINS.draw(5, seed) == CHAINS.draw(5, seed) != CHAINS.draw(5, seed + 1)


class Follower(nn.Module):
    """Predicts what the fed token is linked to by the fact that it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        stop = CHAINS.vocabulary.id_of(".")
        found = []
        for row in input_ids.tolist():
            begins = [0, *(i + 1 for i, token in enumerate(row) if token == stop)][:-1]
            links = {row[at]: row[at + 1] for at in begins}
            found.append([links.get(token, stop) for token in row])
        words = len(CHAINS.vocabulary)
        return SimpleNamespace(logits=nn.functional.one_hot(torch.tensor(found), words))


def test_who_reads_left_sides_is_right(seed: int) -> None:
    texts = CHAINS.draw(30, seed, 7)
    batch = CHAINS.batch(texts)
    assert answer_accuracy(Follower(), batch).sequences == 1
    exchanged = swap_check(Follower(), batch, seed)
    assert exchanged.moved > 0.8, "but where the symbol put in stands on another left side"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 3, 3), "symbols=3: use 4 to 26"),
        ((27, 3, 8), "symbols=27: use 4 to 26"),
        ((16, 2, 8), "shortest=2, longest=8"),
        ((16, 8, 7), "shortest=8, longest=7"),
        ((8, 3, 7), "longest=7.*8 symbols are enough for 6"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ChainsTask(*sizes)


@pytest.mark.parametrize("length", [0, 2, 13])
def test_wrong_lengths(length: int) -> None:
    with pytest.raises(OptionError, match=f"length={length}: use 3 to 12"):
        CHAINS.draw(1, 0, length)
