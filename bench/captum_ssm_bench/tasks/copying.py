"""Copying: a string, a separator, and the string again (Jelassi et al. 2024; LATIM, section 4.1).

The logits at the separator predict the first token of the copy, those at each token of the copy
the next one::

    d a b b c | d a b b c

The source of each prediction is known exactly: the j-th token of the copy is the j-th token of the
string.  Symbols repeat and lengths vary, so that neither the symbol nor any fixed distance gives
the source away.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from captum_ssm.errors import InputError, OptionError

from .linked import SEPARATOR, Family, LinkedTask, LinkedText

ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CopyingTask(LinkedTask):
    """Strings of independent, uniformly drawn symbols, to be copied.

    Attributes:
        symbols: size of the alphabet, the first of a-z, A-Z, 0-9; from 2 to 62. Default: 16.
        shortest: least length of a string. Default: 8.
        longest: greatest length of a string. Default: 16.

    Raises:
        OptionError: when a number is out of its range.

    Example:
        >>> from captum_ssm_bench.tasks import CopyingTask
        >>> task = CopyingTask(symbols=4, shortest=2, longest=3)
        >>> batch = task.batch(["ab", "cad"])
        >>> [task.vocabulary.decode(ids) for ids in batch.input_ids]
        ['<pad> <pad> a b | a b', 'c a d | c a d']
        >>> batch.links.sources.tolist()
        [2, 3, 0, 1, 2]
    """

    symbols: int = 16
    shortest: int = 8
    longest: int = 16

    def __post_init__(self) -> None:
        if not 2 <= self.symbols <= len(ALPHABET):
            raise OptionError(f"symbols={self.symbols}: use 2 to {len(ALPHABET)}.")
        super().__post_init__()

    @property
    def bounds(self) -> tuple[int, float]:
        """Strings of any length."""
        return 1, math.inf

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
        known, length = ALPHABET[: self.symbols], len(example)
        if not example or set(example) - set(known):
            raise InputError(
                f"the string {example!r} cannot be copied: use one or more of the symbols {known}."
            )
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
