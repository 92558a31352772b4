"""A word-level vocabulary, in which each word is one token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .._files import write_whole
from ..errors import InputError

#: The padding word, and the word that replaces unknown words.
PAD, UNKNOWN = "<pad>", "<unk>"


class WordVocabulary:
    """A map from whitespace-separated words to ids and back.

    An unknown word is encoded as ``<unk>``, or is an error if the vocabulary has no ``<unk>``.

    Args:
        words: all words, without repetitions. The position of a word is its id; the word at
            position 0 is the padding word.

    Raises:
        InputError: when a word occurs twice, is empty or contains whitespace.

    Example:
        >>> from captum_ssm.models import WordVocabulary
        >>> vocabulary = WordVocabulary(["<pad>", "a", "lamp"])
        >>> vocabulary.encode("a lamp"), vocabulary.decode([1, 2]), len(vocabulary)
        ([1, 2], 'a lamp', 3)
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.vocab: list[str] = list(words)
        self._ids = {word: i for i, word in enumerate(self.vocab)}
        if len(self._ids) != len(self.vocab):
            repeated = next(word for word in words if self.vocab.count(word) > 1)
            raise InputError(f"words contains {repeated!r} more than once. Pass each word once.")
        for word in self.vocab:
            if word.split() != [word]:
                raise InputError(
                    f"words contains {word!r}. Pass non-empty words without whitespace."
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} words)"

    @classmethod
    def from_json(cls, path: str | Path) -> WordVocabulary:
        """Read a vocabulary from a JSON file with a list of words, as written by :meth:`to_json`.

        Raises:
            InputError: when the file does not contain a JSON list of words.
        """
        try:
            words = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path} is not JSON: {error}. Pass a file with a JSON list of words."
            ) from None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError(
                f"{path} contains other JSON than a list of words. Pass a file of to_json()."
            )
        return cls(words)

    def to_json(self, path: str | Path) -> None:
        """Write the vocabulary as a JSON list of words; an old file is replaced."""
        write_whole(Path(path), json.dumps(self.vocab, indent=0) + "\n")

    @property
    def pad_id(self) -> int:
        """The id of the padding word."""
        return 0

    def __len__(self) -> int:
        return len(self.vocab)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def id_of(self, word: str) -> int:
        """Return the id of one word, or the id of ``<unk>`` for an unknown word.

        Raises:
            InputError: when the vocabulary has neither the word nor ``<unk>``.
        """
        word_id = self._ids.get(word, self._ids.get(UNKNOWN))
        if word_id is None:
            raise InputError(f"unknown word {word!r}. Use words of {' '.join(self.vocab)}")
        return word_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of the whitespace-separated words of ``text``.

        Raises:
            InputError: when a word is unknown and the vocabulary has no ``<unk>``.
        """
        return [self.id_of(word) for word in text.split()]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the word of each id, in a list; ``ids`` are integers, or a tensor (L,).

        Raises:
            InputError: when an id is outside the vocabulary.
        """
        return [self._word_of(int(i)) for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Join the words of ids by spaces; the inverse of :meth:`encode`.

        Raises:
            InputError: when an id is outside the vocabulary.
        """
        return " ".join(self.tokens(ids))

    def _word_of(self, i: int) -> str:
        if not 0 <= i < len(self.vocab):
            raise InputError(f"id {i} is outside the vocabulary. Use 0 to {len(self.vocab) - 1}.")
        return self.vocab[i]
