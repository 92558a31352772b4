"""Number words: both languages, the order of their words, and which comes from which."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from bench_helpers.task_solvers import Solver

from captum_ssm.errors import InputError, OptionError
from captum_ssm.metrics import AlignmentScores, best_links
from captum_ssm_bench.tasks import (
    NUMBER_WORDS,
    LinkedBatch,
    LinkedText,
    TranslationTask,
    answer_accuracy,
    swap_check,
    translated,
)

SPELT = {
    1: ("one", "eins"),
    10: ("ten", "zehn"),
    12: ("twelve", "zwölf"),
    21: ("twenty one", "ein und zwanzig"),
    30: ("thirty", "dreißig"),
    100: ("one hundred", "ein hundert"),
    101: ("one hundred and one", "ein hundert eins"),
    116: ("one hundred and sixteen", "ein hundert sechzehn"),
    342: ("three hundred and forty two", "drei hundert zwei und vierzig"),
    1000: ("one thousand", "ein tausend"),
    1001: ("one thousand and one", "ein tausend eins"),
    1200: ("one thousand two hundred", "ein tausend zwei hundert"),
    71_000: ("seventy one thousand", "ein und siebzig tausend"),
    101_011: ("one hundred and one thousand and eleven", "ein hundert ein tausend elf"),
    617_089: (
        "six hundred and seventeen thousand and eighty nine",
        "sechs hundert siebzehn tausend neun und achtzig",
    ),
}


def _values(ones: str, tens: str) -> dict[str, int]:
    values = {word: i for i, word in enumerate(ones.split(), 1)}
    return values | {word: 10 * i for i, word in enumerate(tens.split(), 2)}


ENGLISH = _values(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen",
    "twenty thirty forty fifty sixty seventy eighty ninety",
)
GERMAN = {"ein": 1} | _values(
    "eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
    "sechzehn siebzehn achtzehn neunzehn",
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
)

#: The thousands or the ones, what a word is among them, and the digits it says.
Place = tuple[str, str, int]


def _places(
    words: Sequence[str], values: dict[str, int], hundred: str, thousand: str
) -> list[Place | None]:
    """What each word stands for, or None where it only joins others."""
    found: list[Place | None] = []
    block = "thousands" if thousand in words else "ones"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in (hundred, thousand):
            found.append((block, "hundred" if word == hundred else "thousand", 0))
            block = "ones" if word == thousand else block
        elif word in values:
            found.append((block, "digit" if following == hundred else "rest", values[word]))
        else:
            found.append(None)
    return found


def _value(places: list[Place | None]) -> int:
    total = 0
    for block, kind, digits in (place for place in places if place):
        total += digits * (1000 if block == "thousands" else 1) * (100 if kind == "digit" else 1)
    return total


def _sides(text: LinkedText) -> tuple[list[Place | None], list[Place | None]]:
    words = list(text.words)
    bar = words.index("|")
    return (
        _places(words[:bar], ENGLISH, "hundred", "thousand"),
        _places(words[bar + 1 :], GERMAN, "hundert", "tausend"),
    )


def _numbers() -> list[int]:
    """Numbers of all sizes, and all of the awkward ones below 1,200."""
    return [*range(1, 1200), *NUMBER_WORDS.draw(800, random.randrange(10**9))]


@pytest.mark.parametrize("number", SPELT)
def test_spelling(number: int) -> None:
    text = translated(number)
    english, german = SPELT[number]
    assert text.prompt == f"{english} |"
    assert text.completion == german


def test_both_languages_say_the_number() -> None:
    for number in _numbers():
        english, german = _sides(translated(number))
        assert _value(english) == _value(german) == number


def test_sure_links_join_what_stands_for_the_same() -> None:
    for number in _numbers():
        text = translated(number)
        english, german = _sides(text)
        assert text.answer == len(english) + 1
        assert text.context == range(len(english))
        expected = {
            (text.answer + i, english.index(place))
            for i, place in enumerate(german)
            if place is not None
        }
        assert len(text.sure) == len(expected)
        assert set(text.sure) == expected
        linked = {source for _, source in text.sure}
        assert {i for i, place in enumerate(english) if place is None} == set(
            range(len(english))
        ) - linked


def test_possible_links_are_those_of_what_joins() -> None:
    for number in _numbers():
        text = translated(number)
        sure, expected = dict(text.sure), set()
        for i, word in enumerate(text.words):
            if word == "und":
                expected |= {(i, sure[i - 1]), (i, sure[i + 1])}
        assert len(text.possible) == len(expected)
        assert set(text.possible) == expected


def test_numbers_are_those_of_the_task() -> None:
    seed = random.randrange(10**9)
    task = TranslationTask(shortest=2, longest=4)
    drawn = task.draw(600, seed)
    assert drawn == task.draw(600, seed) != task.draw(600, seed + 1)
    assert {len(str(number)) for number in drawn} == {2, 3, 4}
    assert {len(str(number)) for number in task.draw(20, seed, length=6)} == {6}
    rng = random.Random(seed)
    assert task.draw(100, rng) + task.draw(500, rng) == drawn


def test_all_words_are_drawn() -> None:
    batch = NUMBER_WORDS.batch(NUMBER_WORDS.draw(2000, random.randrange(10**9)))
    assert set(batch.input_ids.unique().tolist()) == set(range(len(NUMBER_WORDS.vocabulary)))
    assert len(NUMBER_WORDS.vocabulary) == 63


def test_batch_by_hand() -> None:
    batch = NUMBER_WORDS.batch([42, 100])
    words = NUMBER_WORDS.vocabulary.decode
    assert words(batch.input_ids[0]) == "forty two | zwei und vierzig"
    assert words(batch.input_ids[1]) == "<pad> one hundred | ein hundert"
    assert batch.targets.queries.tolist() == [2, 3, 4, 3, 4]
    assert words(batch.targets.tokens) == "zwei und vierzig ein hundert"
    assert [x.tolist() for x in batch.links[:3]] == [[0, 0, 1, 1], [2, 4, 3, 4], [1, 0, 1, 2]]
    assert [x.tolist() for x in batch.possible_links[:3]] == [[0, 0], [3, 3], [0, 1]]
    assert words(batch.possible_links.tokens) == "und und"


def _rule(prompt: Sequence[str]) -> Sequence[str]:
    number = _value(_places(prompt, ENGLISH, "hundred", "thousand"))
    return translated(number).words[len(prompt) :]


def test_the_right_translation_follows_its_sources_and_nothing_else() -> None:
    batch = NUMBER_WORDS.batch(NUMBER_WORDS.draw(60, random.randrange(10**9)))
    model = Solver(NUMBER_WORDS, _rule, ends="|")
    assert answer_accuracy(model, batch) == (1, 1)
    assert swap_check(model, batch, seed=random.randrange(10**9)) == (1, 0)


def test_word_by_word_in_the_english_order_is_found_out() -> None:
    """Right where there are no units after tens; its errors come from the reordering alone."""
    forty_two = NUMBER_WORDS.batch([342])
    german = {i: word for word, i in GERMAN.items() if word != "eins"}
    others = {"hundred": "hundert", "thousand": "tausend", "and": "und"}

    def rule(prompt: Sequence[str]) -> Sequence[str]:
        return [others[w] if w in others else german[ENGLISH[w]] for w in prompt[:-1]]

    # drei hundert und vierzig zwei, for drei hundert zwei und vierzig
    model = Solver(NUMBER_WORDS, rule, ends="|")
    assert answer_accuracy(model, forty_two) == (2 / 5, 0)
    check = swap_check(model, forty_two, seed=1)
    # of three, forty and two, the first alone moves its own; the others change each other's place
    assert check.moved == pytest.approx(1 / 3)
    assert check.strayed == pytest.approx(2 / 12)


def _error_rate(batch: LinkedBatch, maps: torch.Tensor) -> float:
    scores = AlignmentScores()
    scores.update(best_links(maps, batch.pairs()), batch.gold(), batch.possible())
    return float(scores.compute().error_rate)


def test_links_serve_the_alignment_error_rate() -> None:
    batch = NUMBER_WORDS.batch(NUMBER_WORDS.draw(80, random.randrange(10**9)))
    assert _error_rate(batch, batch.possible().double()) == 0
    width = batch.input_ids.shape[1]
    diagonal = torch.zeros(len(batch.input_ids), width, width)
    for row, context in enumerate(batch.context):
        first, count = int(context.int().argmax()), int(context.sum())
        for query in range(first + count, width - 1):
            place = min(query - first - count, count - 1)
            diagonal[row, query, first + place] = 1
    assert 0.15 <= _error_rate(batch, diagonal) <= 0.6, "the order of words matters"


def test_bad_input_is_named() -> None:
    for options in ({"shortest": 0}, {"longest": 7}, {"shortest": 4, "longest": 3}):
        with pytest.raises(OptionError, match="1 to 6 digits"):
            TranslationTask(**options)
    for length in (0, 7):
        with pytest.raises(OptionError, match=f"length={length}"):
            NUMBER_WORDS.draw(1, 0, length)
    for number in (0, -3, 10**6):
        with pytest.raises(InputError, match=f"number={number}: use 1 to 999,999"):
            NUMBER_WORDS.batch([5, number])
    with pytest.raises(InputError, match="numbers is empty"):
        NUMBER_WORDS.batch([])
