"""Copying: a string, a separator, and the string again (Jelassi et al. 2024; LATIM, section 4.1).

The logits at the separator predict the first token of the copy, those at each token of the copy
the next one::

    d a b b c | d a b b c

Where each prediction comes from is known exactly: the j-th token of the copy is the j-th token of
the string.  Symbols repeat and lengths vary, so that neither the symbol nor any fixed distance
gives the source away.

Shapes: B strings, L tokens of the longest row, K copied tokens of all strings together.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from captum_ssm.errors import InputError, OptionError
from captum_ssm.models.vocabulary import PAD, WordVocabulary

from .answers import Accuracy, SwapCheck, answer_accuracy, swap_check
from .linked import SEPARATOR, Family, LinkedBatch, LinkedText, Links

__all__ = [
    "LONG_COPIES",
    "SHORT_COPIES",
    "CopyAccuracy",
    "CopyBatch",
    "CopyingTask",
    "Links",
    "SwapCheck",
    "copy_accuracy",
    "swap_check",
]

ALPHABET = string.ascii_letters + string.digits


@cache
def _vocabulary(symbols: int) -> WordVocabulary:
    return WordVocabulary([PAD, SEPARATOR, *ALPHABET[:symbols]])


@dataclass(frozen=True)
class CopyingTask:
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
        if not 1 <= self.shortest <= self.longest:
            raise OptionError(
                f"shortest={self.shortest}, longest={self.longest}: lengths start at 1, and the "
                "shortest is not above the longest."
            )

    @property
    def vocabulary(self) -> WordVocabulary:
        """Padding, the separator and the symbols, in this order."""
        return _vocabulary(self.symbols)

    @property
    def families(self) -> Sequence[Family]:
        """All symbols; each is followed by itself."""
        return ([(symbol, symbol) for symbol in ALPHABET[: self.symbols]],)

    def draw(self, count: int, seed: int | random.Random, length: int | None = None) -> list[str]:
        """Strings; the same seed gives the same ones.

        Args:
            count: how many.
            seed: a seed, or a generator to go on drawing from.
            length: of every string. Default: None, drawn anew for each.

        Returns:
            The strings, without separator and copy.

        Raises:
            OptionError: when ``length`` is below 1.
        """
        if length is not None and length < 1:
            raise OptionError(f"length={length}: a string has at least one symbol.")
        rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        lengths = (length or rng.randint(self.shortest, self.longest) for _ in range(count))
        return ["".join(rng.choices(ALPHABET[: self.symbols], k=n)) for n in lengths]

    def batch(self, strings: Sequence[str], device: torch.device | str = "cpu") -> CopyBatch:
        """Each string with its separator and copy, padded on the left.

        Args:
            strings: of any length, over the task's symbols.
            device: where the tensors go. Default: ``"cpu"``.

        Returns:
            The batch; a row has two tokens for each symbol, and the separator.

        Raises:
            InputError: when there is no string, or one is empty or has another symbol.
        """
        if not strings:
            raise InputError("strings is empty: a batch needs at least one string.")
        known = ALPHABET[: self.symbols]
        for text in strings:
            if not text or set(text) - set(known):
                raise InputError(
                    f"the string {text!r} cannot be copied: use one or more of the symbols {known}."
                )
        return CopyBatch.of(self, [_copied(text) for text in strings], device)


def _copied(text: str) -> LinkedText:
    length = len(text)
    return LinkedText(
        words=(*text, SEPARATOR, *text),
        answer=length + 1,
        context=range(length),
        sure=tuple((length + 1 + j, j) for j in range(length)),
    )


@dataclass(frozen=True, eq=False)
class CopyBatch(LinkedBatch):
    """Strings with their copies, padded on the left; each copied token has one source.

    Made by :meth:`CopyingTask.batch`; attributes as of :class:`LinkedBatch`.

    Example:
        >>> from captum_ssm_bench.tasks import SHORT_COPIES
        >>> batch = SHORT_COPIES.batch(["ab"])  # a b | a b
        >>> batch.gold()[0].nonzero().tolist()  # the logits at | come from the first a
        [[2, 0], [3, 1]]
        >>> batch.gold(diagonals=3)[0].nonzero().tolist()
        [[2, 0], [2, 1], [3, 0], [3, 1]]
    """

    @property
    def lengths(self) -> Tensor:
        """Of the strings (B,); a row has twice as many tokens and the separator."""
        return self.context.sum(-1)

    def gold(self, diagonals: int = 1) -> Tensor:
        """The gold as a map (B, L, L) of booleans: row i, what the logits at token i come from.

        LATIM's table 2 has ones along the three main diagonals of the copy-source block, because
        a source may be written to the state at its neighbour: with ``diagonals=3`` token j of
        the copy comes from the tokens j - 1, j and j + 1 of the string, where it has them.  The
        paper does not say whether its rows are the tokens that predict, as here, or the tokens
        predicted, one further right.

        Args:
            diagonals: an odd number. Default: 1, the source alone.

        Returns:
            (B, L, L) of booleans.

        Raises:
            OptionError: when ``diagonals`` is even or below 1.
        """
        if diagonals < 1 or diagonals % 2 == 0:
            raise OptionError(f"diagonals={diagonals}: use an odd number, 1 or above.")
        rows, queries, sources, _ = self.links
        (count, width), half = self.input_ids.shape, diagonals // 2
        gold = torch.zeros(count, width, width, dtype=torch.bool, device=rows.device)
        for shift in range(-half, half + 1):
            near = sources + shift
            inside = near.clamp(0, width - 1)
            within = (near == inside) & self.context[rows, inside]
            gold[rows[within], queries[within], near[within]] = True
        return gold


#: What all tasks share, under the names of this one.
CopyAccuracy = Accuracy
copy_accuracy = answer_accuracy

#: What the bundled model copying-mamba was trained on: 8 to 16 tokens over 16 symbols.
SHORT_COPIES = CopyingTask(symbols=16, shortest=8, longest=16)
#: What the bundled model copying-mamba2 was trained on: 10 to 24 tokens over 32 symbols.
LONG_COPIES = CopyingTask(symbols=32, shortest=10, longest=24)
