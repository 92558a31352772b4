"""Retrieval from long texts: passkeys in filler, and the most frequent word (LATIM, section 4.3).

Passkeys (Mohtashami and Jaggi 2023) are stated somewhere in text that has nothing to say, and one
of them is asked for at its end::

    the sky is blue . the passkey of anna is 4 1 7 . here we go . ? the passkey of anna is 4 1 7

Frequent words are coded words among dots; how often each occurs follows Zipf's law (Hsieh et al.
2024, RULER)::

    . pilo . . gema pilo . tusa . ? the most frequent word is pilo

Lengths count the tokens of a text, question and answer included.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from .linked import Family, LinkedTask, LinkedText

ASK, STOP, IS = "?", ".", "is"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DIGITS = _words("0 1 2 3 4 5 6 7 8 9")
NAMES = _words("anna bob carl dora emil fay gus hana")
OWNED = _words("the passkey of")
SENTENCES = (
    _words("the grass is green ."),
    _words("the sky is blue ."),
    _words("the sun is yellow ."),
    _words("here we go ."),
    _words("there and back again ."),
)

CODED = _words(
    "amit bafo cuda dilo femu gema hiro jupa kela lony mubi naso oske pilo quex rado sive tusa "
    "ufan vole wamo xeno yaro zibu"
)
FREQUENT = _words("? the most frequent word is")


@dataclass(frozen=True)
class PasskeyTask(LinkedTask):
    """Passkeys of several persons, one of which is asked for.

    Each digit of the answer has one sure source, the digit of the same place in the passkey.  The
    other digits of the passkey and its owner's name are possible ones.

    Attributes:
        keys: how many passkeys a text states, each of another person; 1 to 8. Default: 1.
        digits: of a passkey. Default: 3.
        shortest: least number of tokens of a text. Default: 64.
        longest: greatest number of tokens of a text. Default: 128.
    """

    shortest: int = 64
    longest: int = 128
    keys: int = 1
    digits: int = 3

    @property
    def least(self) -> int:
        """The tokens of statements, question and answer."""
        stated = len(OWNED) + 2 + self.digits  # a name, is, and the digits
        return self.keys * (stated + 1) + 1 + stated

    @property
    def words(self) -> Iterable[str]:
        """The question mark, digits, names, and the words around them."""
        return ASK, *DIGITS, *NAMES, *OWNED, IS, *chain.from_iterable(SENTENCES)

    @property
    def families(self) -> Sequence[Family]:
        """The digits."""
        return ([(digit, digit) for digit in DIGITS],)

    def example(self, rng: random.Random, length: int) -> LinkedText:
        """One text of ``length`` tokens; the statements stand between sentences of the filler."""
        context, passkeys = self._stated(rng, length)
        asked = list(passkeys)[rng.randrange(self.keys)]
        return self._asking(context, asked, passkeys[asked])

    def _stated(
        self, rng: random.Random, length: int
    ) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """The words before the question, and the passkeys by the names of their owners."""
        sentences = _filler(rng, length - self.least)
        names = rng.sample(NAMES, self.keys)
        passkeys = [tuple(rng.choices(DIGITS, k=self.digits)) for _ in names]
        for name, passkey in zip(names, passkeys, strict=True):
            place = rng.randint(0, len(sentences))
            sentences.insert(place, (*OWNED, name, IS, *passkey, STOP))
        return tuple(chain.from_iterable(sentences)), dict(zip(names, passkeys, strict=True))

    def _asking(self, context: tuple[str, ...], name: str, passkey: tuple[str, ...]) -> LinkedText:
        owner = context.index(name)  # names stand in statements alone
        stated = range(owner + 2, owner + 2 + self.digits)
        question = (ASK, *OWNED, name, IS)
        begin = len(context) + len(question)
        answer = range(begin, begin + self.digits)
        return LinkedText(
            words=(*context, *question, *passkey),
            answer=answer.start,
            context=range(len(context)),
            sure=tuple(zip(answer, stated, strict=True)),
            possible=tuple(
                (target, source)
                for place, target in enumerate(answer)
                for source in (owner, *stated)
                if source != stated[place]
            ),
        )


@dataclass(frozen=True)
class FrequentWordTask(LinkedTask):
    """Coded words among dots, the most frequent of which is asked for.

    Of the tokens before the question, the one of rank r makes up a share proportional to
    r ** -exponent, rounded down.  The dots have the first rank and also make up the rest.  All
    occurrences of the answer are its sure sources.

    Attributes:
        exponent: of Zipf's law. Default: 2.0, that of RULER.
        shortest: least number of tokens of a text. Default: 64.
        longest: greatest number of tokens of a text. Default: 128.
    """

    shortest: int = 64
    longest: int = 128
    exponent: float = 2.0

    @property
    def words(self) -> Iterable[str]:
        """The dot, the coded words and those of the question."""
        return STOP, *CODED, *FREQUENT

    @property
    def families(self) -> Sequence[Family]:
        """The coded words."""
        return ([(word, word) for word in CODED],)

    def example(self, rng: random.Random, length: int) -> LinkedText:
        """One text of ``length`` tokens; which words are frequent is drawn, and so is the order."""
        size = length - len(FREQUENT) - 1
        counts = [int(size * share) for share in _shares(self.exponent)]
        ranked = rng.sample(CODED, len(CODED))
        coded = [word for word, n in zip(ranked, counts, strict=True) for _ in range(n)]
        context = coded + [STOP] * (size - len(coded))
        rng.shuffle(context)
        answer = length - 1
        return LinkedText(
            words=(*context, *FREQUENT, ranked[0]),
            answer=answer,
            context=range(size),
            sure=tuple((answer, i) for i, word in enumerate(context) if word == ranked[0]),
        )


def _filler(rng: random.Random, size: int) -> list[tuple[str, ...]]:
    """Sentences of so many words together, drawn at random; the first may lack its beginning."""
    sentences: list[tuple[str, ...]] = []
    while size > 0:
        sentence = rng.choice(SENTENCES)[-size:]
        sentences.append(sentence)
        size -= len(sentence)
    return sentences[::-1]


@cache
def _shares(exponent: float) -> tuple[float, ...]:
    """Of the coded words, the most frequent first; the dots' share comes before them."""
    weights = [rank**-exponent for rank in range(1, len(CODED) + 2)]
    return tuple(weight / sum(weights) for weight in weights[1:])


#: The task that the bundled models passkey-mamba and passkey-mamba2 were trained on.
ONE_PASSKEY = PasskeyTask(keys=1, digits=3)
#: The task that the bundled models two-passkeys-mamba and two-passkeys-mamba2 were trained on.
TWO_PASSKEYS = PasskeyTask(keys=2, digits=2)
#: The task that the bundled models frequent-word-mamba and frequent-word-mamba2 were trained on.
FREQUENT_WORD = FrequentWordTask()
