"""Texts of bytes with a planted mechanism: the answer has one word as its source.

- pairs: words with values, then one of the words again, ``fox=cup;hen=oak;yak=pin;hen=`` → ``oak``;
- names: two people exchange gifts, and one gives again,
  ``amy gave ben a cup at the lake; ben sent a pin to`` → ``amy``;
- brackets: the last open bracket is to be closed, and another pair has been closed since it opened,
  ``( axe [ cow < > ] den :`` → ``)``.

Words of a kind have equally many bytes, so any of them can replace another in place. No two words
of a kind begin alike (brackets are one byte), so the first byte of an answer tells the answers
apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

#: By kind, the words that replace each other.
KINDS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split())
    for name, words in {
        "key": "axe bee cow den elk fox gnu hen ivy jay kid lid mud nut owl pea ram sea tar vat",
        "thing": "arm bag cup dog ear fig gem hat ink jar keg log map net oak pin rug sun tea urn",
        "name": "amy ben cal dan eva fay guy hal ida jim kit leo max ned ora pam ray sue tom una",
        "verb": "gave lent sent",
        "place": "barn dock farm lake mill park",
        "open": "( [ { <",
        "close": ") ] } >",
    }.items()
}
CLOSING = dict(zip(KINDS["open"], KINDS["close"], strict=True))
#: Words that stay: they are of no kind.
_FIXED = ""


@dataclass(frozen=True)
class ByteText:
    """A text and its answer.

    Attributes:
        words: all parts of the prompt, each with its kind, empty for those that stay.
        source: the index of the part that the answer is read off.
        answer: what follows.
        further: what may be asked after it, each a prompt and an answer; for training.
    """

    words: tuple[tuple[str, str], ...]
    source: int
    answer: str
    further: tuple[tuple[str, str], ...] = ()

    @property
    def movable(self) -> list[bool]:
        """Which parts can be replaced."""
        return [bool(kind) for _, kind in self.words]

    @property
    def prompt(self) -> bytes:
        """The bytes before the answer."""
        return "".join(word for word, _ in self.words).encode()

    def ids(self) -> list[int]:
        """The bytes of the prompt and the answer."""
        return [*self.prompt, *self.answer.encode()]


def pairs(rng: random.Random) -> ByteText:
    """One to six pairs and a question."""
    count = rng.randint(1, 6)
    keys, values = (rng.sample(KINDS[kind], count) for kind in ("key", "thing"))
    parts = [
        each
        for key, value in zip(keys, values, strict=True)
        for each in ((key, "key"), ("=", _FIXED), (value, "thing"), (";", _FIXED))
    ]
    asked, *others = rng.sample(range(count), count)
    parts += [(keys[asked], "key"), ("=", _FIXED)]
    further = tuple((f";{keys[i]}=", values[i]) for i in others)
    return ByteText(tuple(parts), 4 * asked + 2, values[asked], further)


def names(rng: random.Random) -> ByteText:
    """Who gives the second time is one of two; the answer is the other."""
    both = rng.sample(KINDS["name"], 2)
    giver = rng.randrange(2)
    things, verbs = rng.sample(KINDS["thing"], 2), rng.choices(KINDS["verb"], k=2)
    parts = [
        *((both[0], "name"), (" ", _FIXED), (verbs[0], "verb"), (" ", _FIXED), (both[1], "name")),
        *((" a ", _FIXED), (things[0], "thing"), (" at the ", _FIXED)),
        *((rng.choice(KINDS["place"]), "place"), ("; ", _FIXED), (both[giver], "name")),
        *((" ", _FIXED), (verbs[1], "verb"), (" a ", _FIXED), (things[1], "thing")),
        (" to ", _FIXED),
    ]
    further = tuple(
        (f"; {both[i]} {rng.choice(KINDS['verb'])} a {rng.choice(KINDS['thing'])} to ", both[1 - i])
        for i in (rng.randrange(2), rng.randrange(2))
    )
    return ByteText(tuple(parts), 0 if giver else 4, both[1 - giver], further)


def brackets(rng: random.Random) -> ByteText:
    """Groups of brackets and words, among them one or two brackets that stay open."""
    parts: list[tuple[str, str]] = []
    opened: list[int] = []
    for _ in range(rng.randint(1, 2)):
        if rng.random() < 0.5:
            parts += _group(rng)
        opened.append(len(parts))
        parts += _spaced((rng.choice(KINDS["open"]), "open")) + _some_word(rng)
    parts += _group(rng) + _some_word(rng)
    answer, *others = (CLOSING[parts[i][0]] for i in reversed(opened))
    further = tuple((" ", each) for each in others)
    return ByteText((*parts, (": ", _FIXED)), opened[-1], answer, further)


def _group(rng: random.Random) -> list[tuple[str, str]]:
    opened = rng.choice(KINDS["open"])
    inner = _group(rng) if rng.random() < 0.3 else _some_word(rng)
    return _spaced((opened, "open")) + inner + _spaced((CLOSING[opened], "close"))


def _some_word(rng: random.Random) -> list[tuple[str, str]]:
    return _spaced((rng.choice(KINDS["key"]), "key")) if rng.random() < 0.7 else []


def _spaced(part: tuple[str, str]) -> list[tuple[str, str]]:
    return [part, (" ", _FIXED)]


#: By name, what draws a text.
MECHANISMS: dict[str, Callable[[random.Random], ByteText]] = {
    each.__name__: each for each in (pairs, names, brackets)
}
#: Texts with fewer words that can be replaced are for training alone.
_LEAST_WORDS = 6


def drawn(mechanism: str, rng: random.Random) -> ByteText:
    """Return a text with words enough to be put in an order."""
    while sum((text := MECHANISMS[mechanism](rng)).movable) < _LEAST_WORDS:
        pass
    return text
