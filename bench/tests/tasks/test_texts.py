"""The tasks on texts: one contract for all, and the form of each."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from bench_helpers.task_solvers import Solver

from captum_ssm.errors import InputError
from captum_ssm_bench.tasks import (
    CHAINS,
    FREQUENT_WORD,
    LONG_COPIES,
    NUMBER_WORDS,
    ONE_PASSKEY,
    PAIRS,
    SHORT_COPIES,
    TWO_PASSKEYS,
    FrequentWordTask,
    LinkedBatch,
    LinkedTask,
    LinkedText,
    PasskeyTask,
    RecallTask,
    answer_accuracy,
    swap_check,
)

#: The tasks of all bundled models, and some of other sizes.
TASKS: dict[str, LinkedTask] = {
    "long copies": LONG_COPIES,
    "number words": NUMBER_WORDS,
    "pairs": PAIRS,
    "chains": CHAINS,
    "recall": RecallTask(),
    "one passkey": ONE_PASSKEY,
    "two passkeys": TWO_PASSKEYS,
    "many passkeys": PasskeyTask(keys=8, digits=1, shortest=90, longest=90),
    "frequent word": FREQUENT_WORD,
    "rarer words": FrequentWordTask(exponent=1.2, shortest=60, longest=70),
}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> LinkedTask:
    return TASKS[request.param]


def texts_of(task: LinkedTask, count: int, length: int | None = None) -> list[LinkedText]:
    return [task.linked(each) for each in task.draw(count, random.randrange(10**9), length)]


# --- the contract ----------------------------------------------------------------------------


def test_the_same_seed_draws_the_same(task: LinkedTask, seed: int) -> None:
    assert task.draw(20, seed) == task.draw(20, seed) != task.draw(20, seed + 1)
    rng = random.Random(seed)
    assert task.draw(12, rng) + task.draw(8, rng) == task.draw(20, seed)
    before = random.getstate()
    task.draw(1, seed)
    assert random.getstate() == before


def test_all_words_and_lengths_are_drawn(task: LinkedTask) -> None:
    batch = task.batch(task.draw(600, random.randrange(10**9)))
    assert set(batch.input_ids.unique().tolist()) | {0} == set(range(len(task.vocabulary)))
    assert task.vocabulary.vocab == ["<pad>", *dict.fromkeys(task.words)]
    lengths = [len(text.words) for text in texts_of(task, 300)]
    shortest, longest = (
        {len(text.words) for text in texts_of(task, 30, n)} for n in (task.shortest, task.longest)
    )
    assert min(lengths) <= max(shortest) + 8 and max(lengths) >= min(longest) - 8


def test_answers_stand_last_and_sources_in_the_context(task: LinkedTask) -> None:
    exchanged, sources = {word for family in task.families for word, _ in family}, set[str]()
    for text in texts_of(task, 40):
        assert text.context.stop <= text.answer < len(text.words)
        assert f"{text.prompt} {text.completion}" == " ".join(text.words)
        for target, source in (*text.sure, *text.possible):
            assert text.answer <= target < len(text.words) and source in text.context
        assert text.sure and not set(text.sure) & set(text.possible)
        sources |= {text.words[source] for _, source in text.sure}
    assert sources & exchanged


def test_batches_are_texts_one_by_one(task: LinkedTask) -> None:
    examples = task.draw(5, random.randrange(10**9))
    batch, texts = task.batch(examples), [task.linked(each) for each in examples]
    width = batch.input_ids.shape[1]
    rows, queries, tokens = batch.targets
    assert torch.equal(batch.input_ids[rows, queries + 1], tokens)
    for row, text in enumerate(texts):
        start = width - len(text.words)
        assert task.vocabulary.tokens(batch.input_ids[row, start:]) == list(text.words)
        assert batch.attention_mask[row].tolist() == [0] * start + [1] * len(text.words)
        assert batch.context[row].nonzero().flatten().tolist() == [start + i for i in text.context]
        asked = [start + i - 1 for i in range(text.answer, len(text.words))]
        assert queries[rows == row].tolist() == asked
        sure, further = (
            {(start + target - 1, start + source) for target, source in pairs}
            for pairs in (text.sure, text.possible)
        )
        maps = (batch.gold(), batch.possible(), batch.pairs())
        gold, possible, pairs = ({tuple(p) for p in m[row].nonzero().tolist()} for m in maps)
        assert gold == sure and possible == sure | further
        assert pairs == {(query, start + i) for query in asked for i in text.context}


def test_words_that_are_not_known() -> None:
    with pytest.raises(InputError, match="'three-ish'"):
        LinkedBatch.of(NUMBER_WORDS, [LinkedText(("three-ish", "drei"), 1, range(1), ())])


# --- the form of each ------------------------------------------------------------------------


def test_the_gold_of_a_copy_may_be_wide() -> None:
    batch = SHORT_COPIES.batch(["abcd", "ab"])
    wide = batch.gold(diagonals=3)
    found = [row.nonzero().flatten().tolist() for row in wide[0, 4:8]]
    assert found == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
    assert wide[1].nonzero().tolist() == [[6, 4], [6, 5], [7, 4], [7, 5]]
    assert torch.equal(batch.gold(1), batch.gold())


NUMBERS = {
    1: ("one", "eins"),
    16: ("sixteen", "sechzehn"),
    70: ("seventy", "siebzig"),
    21: ("twenty one", "ein und zwanzig"),
    101: ("one hundred and one", "ein hundert eins"),
    1001: ("one thousand and one", "ein tausend eins"),
    21000: ("twenty one thousand", "ein und zwanzig tausend"),
    342_518: (
        "three hundred and forty two thousand five hundred and eighteen",
        "drei hundert zwei und vierzig tausend fünf hundert achtzehn",
    ),
}


def test_numbers_in_two_languages() -> None:
    known = dict(pair for family in NUMBER_WORDS.families for pair in family)
    known |= {"one": "ein", "hundred": "hundert", "thousand": "tausend"}
    for number, (english, german) in NUMBERS.items():
        text = NUMBER_WORDS.linked(number)
        assert text.prompt == f"{english} |" and text.completion == german
        for target, source in text.sure:
            said, meant = text.words[target], known[text.words[source]]
            assert said.removesuffix("s") == meant.removesuffix("s")
        unsure = {text.words[target] for target, _ in text.possible}
        assert unsure == ({"und"} if "und" in german.split() else set())


def test_pairs_are_answered_by_the_value_beside_the_key() -> None:
    for text in texts_of(PAIRS, 40):
        stated = dict(zip(text.words[:-2:2], text.words[1:-2:2], strict=True))
        *_, key, value = text.words
        assert stated[key] == value and len(stated) == (len(text.words) - 2) // 2
        ((target, source),), ((_, matched),) = text.sure, text.possible
        assert target == len(text.words) - 1 and matched == source - 1
        assert (text.words[matched], text.words[source]) == (key, value)


def test_chains_lead_from_fact_to_fact() -> None:
    for text in texts_of(CHAINS, 60):
        facts = [text.words[i : i + 3] for i in range(0, len(text.context), 3)]
        assert all(stop == "." for *_, stop in facts) and len({f[0] for f in facts}) == len(facts)
        following = {left: right for left, right, _ in facts}
        asked, *chain = text.words[text.answer - 1 :]
        assert text.words[text.answer - 2] == "?" and len(chain) == 3
        for word, (target, right), (_, left) in zip(chain, text.sure, text.possible, strict=True):
            assert following[asked] == word == text.words[target] == text.words[right]
            assert text.words[left] == asked and left == right - 1
            asked = word
    rng = random.Random(0)
    first, second = CHAINS.questions(rng, 6)
    assert second.words[: len(first.words)] == first.words
    assert {len(CHAINS.questions(rng, n)) for n in (3, 5)} == {1} and first.sure != second.sure


def statements(words: Any) -> list[tuple[int, str, list[str]]]:
    """Where each name is told a passkey, the name and the passkey."""
    found = []
    for i, word in enumerate(words):
        if word == "passkey":
            digits = []
            for digit in words[i + 4 :]:
                if not digit.isdigit():
                    break
                digits.append(digit)
            found.append((i + 2, words[i + 2], digits))
    return found


@pytest.mark.parametrize("name", ["one passkey", "two passkeys", "many passkeys"])
def test_passkeys_are_stated_in_filler_and_one_is_asked_for(name: str) -> None:
    task, asked = TASKS[name], set()
    assert isinstance(task, PasskeyTask)
    for text in texts_of(task, 60):
        *stated, (question, owner, digits) = statements(text.words)
        passkeys = {name: passkey for _, name, passkey in stated}
        assert len(passkeys) == task.keys and passkeys[owner] == digits
        assert text.completion.split() == digits and text.context == range(question - 4)
        place = text.words.index(owner)
        sources = range(place + 2, place + 2 + task.digits)
        assert list(text.sure) == [(text.answer + i, at) for i, at in enumerate(sources)]
        for i in range(task.digits):
            possible = [source for target, source in text.possible if target == text.answer + i]
            assert possible == [place, *(at for at in sources if at != sources[i])]
        asked.add([name for _, name, _ in stated].index(owner))
    assert asked == set(range(task.keys)), "the first as well as the last is asked for"
    for length in (task.least, 512):
        assert {len(text.words) for text in texts_of(task, 3, length)} == {length}

    def answer(prompt: Any) -> Any:
        *stated, (_, name, _) = statements(prompt)
        return {owner: digits for _, owner, digits in stated}[name]

    batch, model = task.batch(task.draw(24, 0)), Solver(task, answer, ends="?", after=5)
    assert answer_accuracy(model, batch) == (1, 1)
    assert swap_check(model, batch, seed=1).moved == 1


@pytest.mark.parametrize("name", ["frequent word", "rarer words"])
def test_words_are_as_frequent_as_the_law_says(name: str) -> None:
    task = TASKS[name]
    assert isinstance(task, FrequentWordTask)
    for text in texts_of(task, 60):
        size = text.context.stop
        counts = Counter(text.words[:size])
        dots = counts.pop(".")
        weights = [rank**-task.exponent for rank in range(1, 26)]
        expected = [int(size * weight / sum(weights)) for weight in weights[1:]]
        assert sorted(counts.values(), reverse=True) == [n for n in expected if n]
        assert dots + sum(expected) == size
        (answer, most), (_, second) = counts.most_common(2)
        assert most > second and text.completion == answer
        places = [i for i in text.context if text.words[i] == answer]
        assert list(text.sure) == [(text.answer, place) for place in places]
