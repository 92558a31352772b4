"""Translation of number words from English to German, word by word (after LATIM, section 4.2).

German says the units of a number before its tens, and joins the two::

    three hundred and forty two | drei hundert zwei und vierzig

Which English word each German one translates is known exactly, and the order is not the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .linked import SEPARATOR, Family, LinkedTask, LinkedText


def _pairs(english: str, german: str) -> tuple[tuple[str, str], ...]:
    return tuple(zip(english.split(), german.split(), strict=True))


#: Words and their translations: 1 to 9, 10 to 19, and 20, 30, ... to 90.
UNITS = _pairs(
    "one two three four five six seven eight nine",
    "eins zwei drei vier fünf sechs sieben acht neun",
)
TEENS = _pairs(
    "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
    "zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn",
)
TENS = _pairs(
    "twenty thirty forty fifty sixty seventy eighty ninety",
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
)
HUNDRED, THOUSAND = ("hundred", "hundert"), ("thousand", "tausend")
#: What joins words in either language, and has no fixed counterpart in the other.
AND, UND = "and", "und"
#: One before another word.
EIN = "ein"

MOST_DIGITS = 6


@dataclass(frozen=True)
class _Word:
    """A German word and the positions of the English words it may come from."""

    text: str
    sure: tuple[int, ...]
    possible: tuple[int, ...] = ()


@dataclass(frozen=True)
class TranslationTask(LinkedTask):
    """Numbers, to be translated; each count of digits is as likely as any other.

    Sure links join each German word to the one it translates.  German units and tens are joined by
    ``und``; it has possible links alone, to the English units and tens it stands between.

    Attributes:
        shortest: least number of digits. Default: 1.
        longest: greatest number of digits, at most 6. Default: 6.
    """

    shortest: int = 1
    longest: int = MOST_DIGITS

    @property
    def words(self) -> Iterable[str]:
        """The separator, the English words and the German ones."""
        pairs = (*UNITS, *TEENS, *TENS, HUNDRED, THOUSAND)
        english, german = zip(*pairs, strict=True)
        return SEPARATOR, *english, AND, *german, EIN, UND

    @property
    def families(self) -> Sequence[Family]:
        """Words of one kind; one is left out, whose German form depends on the next word."""
        return (UNITS[1:], TEENS, TENS)

    def example(self, rng: random.Random, length: int) -> int:
        """One number."""
        return rng.randrange(10 ** (length - 1), 10**length)

    def linked(self, example: int) -> LinkedText:
        """A number from 1 to 999,999 in English, a separator, and in German."""
        english, german = _spoken(example)
        first = len(english) + 1
        sure = [(first + i, source) for i, word in enumerate(german) for source in word.sure]
        possible = [(first + i, at) for i, word in enumerate(german) for at in word.possible]
        return LinkedText(
            words=(*english, SEPARATOR, *(word.text for word in german)),
            answer=first,
            context=range(len(english)),
            sure=tuple(sure),
            possible=tuple(possible),
        )


def _spoken(number: int) -> tuple[list[str], list[_Word]]:
    english: list[str] = []
    german: list[_Word] = []
    thousands, rest = divmod(number, 1000)
    if thousands:
        _say_below_thousand(thousands, EIN, english, german)
        _say(THOUSAND, english, german)
    if rest:
        _say_below_thousand(rest, UNITS[0][1], english, german)
    return english, german


def _say_below_thousand(number: int, one: str, english: list[str], german: list[_Word]) -> None:
    """Appends what is said for 1 to 999, in German with ``one`` for a one at its end."""
    hundreds, rest = divmod(number, 100)
    if hundreds:
        _say(_unit(hundreds, EIN), english, german)
        _say(HUNDRED, english, german)
    if rest and english:
        english.append(AND)
    tens, units = divmod(rest, 10)
    if tens == 1:
        _say(TEENS[units], english, german)
    elif tens and units:
        place = len(english)
        (ten, zehn), (unit, eins) = TENS[tens - 2], _unit(units, EIN)
        english += [ten, unit]
        german += [
            _Word(eins, (place + 1,)),
            _Word(UND, (), (place, place + 1)),
            _Word(zehn, (place,)),
        ]
    elif tens:
        _say(TENS[tens - 2], english, german)
    elif units:
        _say(_unit(units, one), english, german)


def _say(pair: tuple[str, str], english: list[str], german: list[_Word]) -> None:
    german.append(_Word(pair[1], (len(english),)))
    english.append(pair[0])


def _unit(number: int, one: str) -> tuple[str, str]:
    word, wort = UNITS[number - 1]
    return word, one if number == 1 else wort


#: The task that the bundled models translation-mamba and translation-mamba2 were trained on.
NUMBER_WORDS = TranslationTask()
