"""Chained questions: facts that link one symbol to the next, and an answer that follows the links.

Every symbol can be on either side of a fact, and the answer writes the chain out::

    k c . a k . f d . c e . ? a -> k c e

Each word of the answer is what the fact of the word before it says, so that the last one has
sources of its own in one fact, and came about through all of them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from captum_ssm.errors import OptionError
from captum_ssm.models.vocabulary import PAD, WordVocabulary

from .linked import Family, LinkedBatch, LinkedText

ASK, STOP = "?", "."
SYMBOLS = string.ascii_lowercase
#: Facts of a chain, and words of a fact with its full stop.
LINKS, WORDS = 3, 3

#: A symbol, and the one that it is linked to.
Fact = tuple[str, str]


@cache
def _vocabulary(symbols: int) -> WordVocabulary:
    return WordVocabulary([PAD, ASK, STOP, *SYMBOLS[:symbols]])


@dataclass(frozen=True)
class ChainsTask:
    """Facts in random order, of as many chains of three as they are enough for, and single ones.

    A length counts facts: 8 of them are two chains and two single facts.  No symbol is of two
    chains.  Of each answered word the right side of its fact is the sure source, the left side a
    possible one.

    Attributes:
        symbols: how many there are; at most 26. Default: 16.
        shortest: least number of facts, at least 3. Default: 3.
        longest: greatest number of facts, not more than the symbols are enough for. Default: 8.

    Raises:
        OptionError: when a number is out of its range.

    Example:
        >>> from captum_ssm_bench.tasks import ChainsTask
        >>> (text,) = ChainsTask().draw(1, seed=0, length=4)
        >>> text.prompt, text.completion
        ('m p . g a . p g . e i . ? m', 'p g a')
        >>> text.sure  # a, at 16, from the fact at 3
        ((14, 1), (15, 7), (16, 4))
    """

    symbols: int = 16
    shortest: int = 3
    longest: int = 8

    def __post_init__(self) -> None:
        if not LINKS < self.symbols <= len(SYMBOLS):
            raise OptionError(f"symbols={self.symbols}: use {LINKS + 1} to {len(SYMBOLS)}.")
        if not LINKS <= self.shortest <= self.longest <= self.most:
            raise OptionError(
                f"shortest={self.shortest}, longest={self.longest}: a text has {LINKS} facts or "
                f"more, the shortest are not longer than the longest, and {self.symbols} symbols "
                f"are enough for {self.most}."
            )

    @property
    def most(self) -> int:
        """The facts that the symbols are enough for."""
        return max(n for n in range(LINKS, len(SYMBOLS)) if _symbols_of(n) <= self.symbols)

    @property
    def vocabulary(self) -> WordVocabulary:
        """Padding, the question mark, the full stop and the symbols, in this order."""
        return _vocabulary(self.symbols)

    @property
    def families(self) -> Sequence[Family]:
        """The symbols; each is followed by itself."""
        return ([(symbol, symbol) for symbol in SYMBOLS[: self.symbols]],)

    def draw(
        self, count: int, seed: int | random.Random, length: int | None = None
    ) -> list[LinkedText]:
        """Texts; the same seed gives the same ones.

        Args:
            count: how many.
            seed: a seed, or a generator to go on drawing from.
            length: the facts of every text. Default: None, drawn anew for each.

        Returns:
            The texts.

        Raises:
            OptionError: when there are too few facts for a chain, or too few symbols for the facts.
        """
        if length is not None and not LINKS <= length <= self.most:
            raise OptionError(
                f"length={length}: use {LINKS} to {self.most}, as {self.symbols} symbols are "
                "enough for."
            )
        rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        lengths = (length or rng.randint(self.shortest, self.longest) for _ in range(count))
        return [self._text(rng, n) for n in lengths]

    def questions(self, rng: random.Random, length: int) -> list[LinkedText]:
        """The same facts with each of their chains asked for, after the answers to those before.

        Args:
            rng: draws the facts and the order of the questions.
            length: how many facts.

        Returns:
            As many texts as there are chains, each the beginning of the next.

        Example:
            >>> import random
            >>> from captum_ssm_bench.tasks import CHAINS
            >>> first, second = CHAINS.questions(random.Random(0), 6)
            >>> second.prompt.removeprefix(f"{first.prompt} {first.completion} ")
            '? e'
        """
        facts, chains = self._stated(rng, length)
        asked = rng.sample(chains[: length // LINKS], length // LINKS)
        return [_asking(facts, asked[: n + 1]) for n in range(len(asked))]

    def _text(self, rng: random.Random, length: int) -> LinkedText:
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

    def batch(self, texts: Sequence[LinkedText], device: torch.device | str = "cpu") -> LinkedBatch:
        """The texts, padded on the left.

        Args:
            texts: as drawn, at least one.
            device: where the tensors go. Default: ``"cpu"``.

        Returns:
            The batch; sources are looked for in the facts.
        """
        return LinkedBatch.of(self, texts, device)


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


#: What the bundled models called chains were trained on.
CHAINS = ChainsTask()
