"""Copying: a string, a separator, and the string again (Jelassi et al. 2024; LATIM, section 4.1).

The logits at the separator predict the first token of the copy, those at each token of the copy
the next one::

    d a b b c | d a b b c

The source of each prediction is known exactly: the j-th token of the copy is the j-th token of the
string.  Symbols repeat and lengths vary, so that neither the symbol nor any fixed distance gives
the source away.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .linked import SEPARATOR, Family, LinkedTask, LinkedText

ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CopyingTask(LinkedTask):
    """Strings of independent, uniformly drawn symbols, to be copied.

    Attributes:
        symbols: size of the alphabet, the first of a-z, A-Z, 0-9; from 2 to 62. Default: 16.
        shortest: least length of a string. Default: 8.
        longest: greatest length of a string. Default: 16.
    """

    symbols: int = 16
    shortest: int = 8
    longest: int = 16

    @property
    def words(self) -> Iterable[str]:
        """The separator and the symbols."""
        return SEPARATOR, *ALPHABET[: self.symbols]

    @property
    def families(self) -> Sequence[Family]:
        """All symbols; each is followed by itself."""
        return ([(symbol, symbol) for symbol in ALPHABET[: self.symbols]],)

    def example(self, rng: random.Random, length: int) -> str:
        """One string, without separator and copy."""
        return "".join(rng.choices(ALPHABET[: self.symbols], k=length))

    def linked(self, example: str) -> LinkedText:
        """A string of any length with its separator and copy."""
        length = len(example)
        return LinkedText(
            words=(*example, SEPARATOR, *example),
            answer=length + 1,
            context=range(length),
            sure=tuple((length + 1 + j, j) for j in range(length)),
        )


#: The task that the bundled model copying-mamba was trained on: 8 to 16 tokens over 16 symbols.
SHORT_COPIES = CopyingTask(symbols=16, shortest=8, longest=16)
#: The task that the bundled model copying-mamba2 was trained on: 10 to 24 tokens over 32 symbols.
LONG_COPIES = CopyingTask(symbols=32, shortest=10, longest=24)
