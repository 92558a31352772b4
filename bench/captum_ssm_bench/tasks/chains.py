"""Chained questions: facts that link one symbol to the next, and an answer that follows the links.

Every symbol can be on either side of a fact, and the answer writes the chain out::

    k c . a k . f d . c e . ? a -> k c e

Each word of the answer is the other side of the fact of the word before it, so that the last one
has sources of its own in one fact, and came about through all of them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .linked import Family, LinkedTask, LinkedText

ASK, STOP = "?", "."
SYMBOLS = string.ascii_lowercase
#: Facts of a chain, and words of a fact with its full stop.
LINKS, WORDS = 3, 3

#: A symbol, and the one that it is linked to.
Fact = tuple[str, str]


@dataclass(frozen=True)
class ChainsTask(LinkedTask):
    """Facts in random order, of as many chains of three as they are enough for, and single ones.

    A length counts facts: 8 of them are two chains and two single facts.  No symbol is of two
    chains.  Of each answered word the right side of its fact is the sure source, the left side a
    possible one.

    Attributes:
        symbols: how many there are; at most 26. Default: 16.
        shortest: least number of facts, at least 3. Default: 3.
        longest: greatest number of facts, not more than the symbols are enough for. Default: 8.
    """

    symbols: int = 16
    shortest: int = 3
    longest: int = 8

    @property
    def words(self) -> Iterable[str]:
        """The question mark, the full stop and the symbols."""
        return ASK, STOP, *SYMBOLS[: self.symbols]

    @property
    def families(self) -> Sequence[Family]:
        """The symbols; each is followed by itself."""
        return ([(symbol, symbol) for symbol in SYMBOLS[: self.symbols]],)

    def questions(self, rng: random.Random, length: int) -> list[LinkedText]:
        """The same facts with each of their chains asked for, after the answers to those before.

        Args:
            rng: draws the facts and the order of the questions.
            length: how many facts.

        Returns:
            As many texts as there are chains, each the beginning of the next.
        """
        facts, chains = self._stated(rng, length)
        asked = rng.sample(chains[: length // LINKS], length // LINKS)
        return [_asking(facts, asked[: n + 1]) for n in range(len(asked))]

    def example(self, rng: random.Random, length: int) -> LinkedText:
        """One text."""
        facts, chains = self._stated(rng, length)
        return _asking(facts, [chains[rng.randrange(length // LINKS)]])

    def _stated(self, rng: random.Random, length: int) -> tuple[list[Fact], list[list[str]]]:
        """The facts in the order in which they stand, and the chains, single facts the last."""
        symbols = rng.sample(SYMBOLS[: self.symbols], _symbols_of(length))
        chains = []
        for links in _links_of(length):
            chains.append(symbols[: links + 1])
            symbols = symbols[links + 1 :]
        facts = [fact for chain in chains for fact in pairwise(chain)]
        rng.shuffle(facts)
        return facts, chains


def _asking(facts: Sequence[Fact], asked: Sequence[Sequence[str]]) -> LinkedText:
    """A text that asks for chains, one after the other; the last is the one it is about."""
    stated = [word for fact in facts for word in (*fact, STOP)]
    words = (*stated, *(word for chain in asked for word in (ASK, *chain)))
    answer = len(words) - LINKS
    places = [WORDS * facts.index(fact) for fact in pairwise(asked[-1])]
    return LinkedText(
        words=words,
        answer=answer,
        context=range(len(stated)),
        sure=tuple((answer + i, place + 1) for i, place in enumerate(places)),
        possible=tuple((answer + i, place) for i, place in enumerate(places)),
    )


def _links_of(length: int) -> list[int]:
    """The facts of each chain, single facts being chains of one."""
    chains, single = divmod(length, LINKS)
    return [LINKS] * chains + [1] * single


def _symbols_of(length: int) -> int:
    return sum(links + 1 for links in _links_of(length))


#: The task that the bundled models called chains were trained on.
CHAINS = ChainsTask()
