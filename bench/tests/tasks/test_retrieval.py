"""Passkeys and frequent words: what the texts hold, how long they are, and their gold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from bench_helpers.task_solvers import Solver

from captum_ssm.errors import OptionError
from captum_ssm_bench.tasks import (
    FREQUENT_WORD,
    ONE_PASSKEY,
    TWO_PASSKEYS,
    FrequentWordTask,
    PasskeyTask,
    answer_accuracy,
    swap_check,
)
from captum_ssm_bench.tasks.retrieval import RetrievalTask

PASSKEYS = [
    ONE_PASSKEY,
    TWO_PASSKEYS,
    PasskeyTask(keys=8, digits=1, shortest=90, longest=90),
    PasskeyTask(keys=5, digits=6, shortest=96, longest=300),
]
FREQUENT = [FREQUENT_WORD, FrequentWordTask(exponent=1.2, shortest=60, longest=70)]
TASKS: list[RetrievalTask] = [*PASSKEYS, *FREQUENT]

FILLER = (
    "the grass is green .",
    "the sky is blue .",
    "the sun is yellow .",
    "here we go .",
    "there and back again .",
)


def _sentences(words: Sequence[str]) -> list[str]:
    found: list[list[str]] = [[]]
    for word in words:
        found[-1].append(word)
        if word == ".":
            found.append([])
    return [" ".join(sentence) for sentence in found if sentence]


def _statements(words: Sequence[str]) -> list[tuple[int, str, list[str]]]:
    """Where each name is told a passkey, the name and the passkey."""
    found = []
    for i, word in enumerate(words):
        if word == "passkey":
            name, digits = words[i + 2], []
            for digit in words[i + 4 :]:
                if not digit.isdigit():
                    break
                digits.append(digit)
            found.append((i + 2, name, digits))
    return found


@pytest.mark.parametrize("task", TASKS)
def test_texts_have_the_lengths_of_the_task(task: RetrievalTask) -> None:
    seed = random.randrange(10**9)
    lengths = [len(text.words) for text in task.draw(500, seed)]
    spread = task.longest - task.shortest
    assert task.shortest <= min(lengths) <= task.shortest + spread / 10
    assert task.longest - spread / 10 <= max(lengths) <= task.longest
    for length in (task.least, task.longest, 512):
        assert {len(text.words) for text in task.draw(3, seed, length)} == {length}


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_texts(task: RetrievalTask) -> None:
    seed = random.randrange(10**9)
    assert task.draw(20, seed) == task.draw(20, seed) != task.draw(20, seed + 1)
    rng = random.Random(seed)
    assert task.draw(12, rng) + task.draw(8, rng) == task.draw(20, seed)


@pytest.mark.parametrize("task", TASKS)
def test_all_words_are_drawn(task: RetrievalTask) -> None:
    batch = task.batch(task.draw(600, random.randrange(10**9)))
    assert set(batch.input_ids.unique().tolist()) | {0} == set(range(len(task.vocabulary)))


# --- passkeys -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", PASSKEYS)
def test_passkeys_are_stated_and_one_is_asked_for(task: PasskeyTask) -> None:
    asked = set()
    for text in task.draw(60, random.randrange(10**9)):
        *stated, (question, name, digits) = _statements(text.words)
        assert len({owner for _, owner, _ in stated}) == len(stated) == task.keys
        assert {len(passkey) for _, _, passkey in stated} == {task.digits}
        assert text.words[question - 4] == "?"
        assert text.prompt.split()[-5:] == ["the", "passkey", "of", name, "is"]
        assert text.completion.split() == digits == {o: p for _, o, p in stated}[name]
        assert text.context == range(question - 4)
        asked.add([owner for _, owner, _ in stated].index(name))
    assert asked == set(range(task.keys)), "the first as well as the last is asked for"


@pytest.mark.parametrize("task", PASSKEYS)
def test_the_rest_is_filler(task: PasskeyTask) -> None:
    places, found = set(), set()
    for text in task.draw(300, random.randrange(10**9)):
        sentences = _sentences(text.words[: text.context.stop])
        filler = [sentence for sentence in sentences if "passkey" not in sentence]
        # the first one may lack its beginning
        assert not filler or any(sentence.endswith(filler[0]) for sentence in FILLER)
        assert set(filler[1:]) <= set(FILLER)
        found |= set(filler[1:])
        places |= {i / len(sentences) for i, s in enumerate(sentences) if "passkey" in s}
    assert found == set(FILLER)
    assert min(places) == 0 and max(places) >= 0.8


@pytest.mark.parametrize("task", PASSKEYS)
def test_gold_is_the_digits_that_were_asked_for(task: PasskeyTask) -> None:
    for text in task.draw(40, random.randrange(10**9)):
        (name,) = {n for _, n, _ in _statements(text.words)[-1:]}
        owner = text.words.index(name)
        digits = range(owner + 2, owner + 2 + task.digits)
        assert list(text.sure) == [(text.answer + i, digits[i]) for i in range(task.digits)]
        assert all(text.words[a] == text.words[b] for a, b in text.sure)
        for i in range(task.digits):
            possible = [source for target, source in text.possible if target == text.answer + i]
            assert sorted(possible) == [owner, *(d for d in digits if d != digits[i])]


@pytest.mark.parametrize("task", PASSKEYS)
def test_every_passkey_is_asked_for_in_its_turn(task: PasskeyTask) -> None:
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    for _ in range(20):
        texts = task.questions(rng, task.longest)
        stated = _statements(texts[0].words)[:-1]
        assert len({text.words[: text.context.stop] for text in texts}) == 1
        for text, (_, owner, digits) in zip(texts, stated, strict=True):
            assert _statements(text.words)[-1][1:] == (owner, digits)
            assert len(text.words) == task.longest
    (drawn,) = task.draw(1, seed, task.longest)
    assert drawn in task.questions(random.Random(seed), task.longest)


def _passkey(prompt: Sequence[str]) -> Sequence[str]:
    *stated, (_, name, _) = _statements(prompt)
    return {owner: digits for _, owner, digits in stated}[name]


def _first_passkey(prompt: Sequence[str]) -> Sequence[str]:
    return _statements(prompt)[0][2]


@pytest.mark.parametrize("task", PASSKEYS)
def test_the_right_passkey_follows_its_sources_and_nothing_else(task: PasskeyTask) -> None:
    batch = task.batch(task.draw(24, random.randrange(10**9)))
    model = Solver(task, _passkey, ends="?", after=5)
    assert answer_accuracy(model, batch) == (1, 1)
    check = swap_check(model, batch, seed=random.randrange(10**9))
    assert check.moved == 1
    assert task.digits == 1 or check.strayed == 0


def test_another_passkey_than_the_asked_one_is_found_out() -> None:
    batch = TWO_PASSKEYS.batch(TWO_PASSKEYS.draw(400, random.randrange(10**9)))
    model = Solver(TWO_PASSKEYS, _first_passkey, ends="?", after=5)
    assert 0.4 <= answer_accuracy(model, batch).sequences <= 0.62
    assert 0.4 <= swap_check(model, batch, seed=1).moved <= 0.6


# --- frequent words -------------------------------------------------------------------------


@pytest.mark.parametrize("task", FREQUENT)
def test_counts_follow_the_law(task: FrequentWordTask) -> None:
    for text in task.draw(100, random.randrange(10**9)):
        size = text.context.stop
        counts = Counter(text.words[:size])
        dots = counts.pop(".")
        weights = [rank**-task.exponent for rank in range(1, 26)]
        expected = [int(size * weight / sum(weights)) for weight in weights[1:]]
        assert sorted(counts.values(), reverse=True) == [n for n in expected if n]
        assert dots + sum(expected) == size


@pytest.mark.parametrize("task", FREQUENT)
@pytest.mark.parametrize("length", [None, 512])
def test_gold_is_all_places_of_the_one_most_frequent_word(
    task: FrequentWordTask, length: int | None
) -> None:
    answers, spread = set(), set()
    for text in task.draw(100, random.randrange(10**9), length):
        coded = [word for word in text.words[: text.context.stop] if word != "."]
        (answer, most), (_, next_most) = Counter(coded).most_common(2)
        assert most > next_most
        assert text.completion == answer
        assert text.prompt.endswith(" ? the most frequent word is")
        assert text.context.stop + 6 == text.answer == len(text.words) - 1
        places = [i for i in text.context if text.words[i] == answer]
        assert list(text.sure) == [(text.answer, place) for place in places]
        assert not text.possible
        answers.add(answer)
        spread |= {place / text.context.stop for place in places}
    assert len(answers) > 10
    assert min(spread) <= 0.1 and max(spread) >= 0.9, "in any order"


@pytest.mark.parametrize("task", [FrequentWordTask(), FrequentWordTask(400, 400, exponent=0.5)])
def test_no_shorter_text_than_the_least_is_needed(task: FrequentWordTask) -> None:
    """From the least length on there is one answer, whatever the length."""
    for length in range(task.least, task.least + 60):
        (text,) = task.draw(1, 0, length)
        coded = Counter(word for word in text.words[: text.context.stop] if word != ".")
        assert len({n for _, n in coded.most_common(2)}) == min(2, len(coded)) >= 1


def _most_frequent(prompt: Sequence[str]) -> Sequence[str]:
    return [Counter(w for w in prompt[: prompt.index("?")] if w != ".").most_common(1)[0][0]]


def _last_word(prompt: Sequence[str]) -> Sequence[str]:
    return [w for w in prompt[: prompt.index("?")] if w != "."][-1:]


@pytest.mark.parametrize("task", FREQUENT)
def test_the_right_word_follows_its_sources(task: FrequentWordTask) -> None:
    batch = task.batch(task.draw(40, random.randrange(10**9)))
    model = Solver(task, _most_frequent, ends="?", after=5)
    assert answer_accuracy(model, batch) == (1, 1)
    assert swap_check(model, batch, seed=random.randrange(10**9)).moved == 1


def test_the_last_word_is_found_out() -> None:
    batch = FREQUENT_WORD.batch(FREQUENT_WORD.draw(300, random.randrange(10**9)))
    model = Solver(FREQUENT_WORD, _last_word, ends="?", after=5)
    assert answer_accuracy(model, batch).tokens <= 0.7
    assert swap_check(model, batch, seed=1).moved <= 0.7


# --- bad input ------------------------------------------------------------------------------


def test_impossible_tasks_are_refused() -> None:
    for keys in (0, 9):
        with pytest.raises(OptionError, match=f"keys={keys}: use 1 to 8"):
            PasskeyTask(keys=keys)
    with pytest.raises(OptionError, match="digits=0"):
        PasskeyTask(digits=0)
    with pytest.raises(OptionError, match=r"exponent=-1\.0"):
        FrequentWordTask(exponent=-1.0)
    with pytest.raises(OptionError, match=r"shortest=17, longest=128: .* 18 tokens or more"):
        PasskeyTask(shortest=17)
    with pytest.raises(OptionError, match="shortest=70, longest=69"):
        FrequentWordTask(shortest=70, longest=69)
    with pytest.raises(OptionError, match=r"length=18: .* 19 tokens or more"):
        FREQUENT_WORD.draw(1, 0, 18)
    with pytest.raises(OptionError, match="length=0"):
        ONE_PASSKEY.draw(1, 0, 0)
