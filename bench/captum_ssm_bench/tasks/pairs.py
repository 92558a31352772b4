"""Associative recall: pairs of a key and a value, then one of the keys (Arora et al. 2023).

The logits at the asking key, which stands last, predict the value beside it::

    c M a K f K b T a -> K

Three words bring the answer about, and any one of them would change it: the key that asks, the key
that it is matched with, and the value that is answered.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .linked import Family, LinkedTask, LinkedText

KEYS, VALUES = string.ascii_lowercase, string.ascii_uppercase


@dataclass(frozen=True)
class PairsTask(LinkedTask):
    """Pairs whose keys are distinct and whose values need not be; a length counts pairs.

    The value of the asked pair is the sure source of the answer, its key a possible one.

    Attributes:
        symbols: how many keys there are, and how many values; at most 26. Default: 16.
        shortest: least number of pairs. Default: 1.
        longest: greatest number of pairs, not above ``symbols``. Default: 6.
    """

    symbols: int = 16
    shortest: int = 1
    longest: int = 6

    @property
    def words(self) -> Iterable[str]:
        """The keys and the values."""
        return (*KEYS[: self.symbols], *VALUES[: self.symbols])

    @property
    def families(self) -> Sequence[Family]:
        """The values; each is followed by itself."""
        return ([(value, value) for value in VALUES[: self.symbols]],)

    def example(self, rng: random.Random, length: int) -> LinkedText:
        """One text."""
        keys = rng.sample(KEYS[: self.symbols], length)
        values = rng.choices(VALUES[: self.symbols], k=length)
        asked, answer = rng.randrange(length), 2 * length + 1
        stated = [word for pair in zip(keys, values, strict=True) for word in pair]
        return LinkedText(
            words=(*stated, keys[asked], values[asked]),
            answer=answer,
            context=range(2 * length),
            sure=((answer, 2 * asked + 1),),
            possible=((answer, 2 * asked),),
        )


#: The task that the bundled models called pairs were trained on.
PAIRS = PairsTask()
#: With keys and values that a state of one number a channel can hold: of pairs-rwkv and
#: pairs-griffin.
FEW_PAIRS = PairsTask(symbols=8, longest=5)
