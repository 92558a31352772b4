"""A classifier's form of a sentence: its words, and one mark that reads the class.

A language model reads the mark last and predicts the class as its next word. An encoder reads the
mark first and has a head for classes there.

Shapes: B texts, L tokens of the longest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .vocabulary import PAD, UNKNOWN, WordVocabulary

#: The special word at which the model predicts the class.
CLS = "<cls>"
#: The words with which language models answer "negative" and "positive".
CLASS_WORDS = ("<negative>", "<positive>")

#: Words with their apostrophes, numbers, and runs of marks, so that ``:-)`` and ``...`` stay whole.
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|(?:[^\w\s]|_)+")


def text_words(text: str) -> tuple[str, ...]:
    """Return the words, numbers and runs of marks of a text, in small letters.

    Args:
        text: the text to split.

    Returns:
        The words in their order.

    Example:
        >>> from captum_ssm.models import text_words
        >>> text_words("It's good :-)")
        ("it's", 'good', ':-)')
    """
    return tuple(_WORD.findall(text.lower()))


def class_vocabulary(texts: Iterable[Sequence[str]], least: int = 1) -> WordVocabulary:
    """Return the words of texts, after the special ones: padding, unknown, mark, classes.

    Args:
        texts: the texts, each as a list of words.
        least: how often a word must occur; rarer ones are unknown. Default: 1.

    Returns:
        The vocabulary; the words of the texts are in alphabetical order.

    Example:
        >>> from captum_ssm.models import class_vocabulary
        >>> texts = [("a", "good", "film"), ("a", "dull", "film")]
        >>> class_vocabulary(texts, least=2).vocab
        ['<pad>', '<unk>', '<cls>', '<negative>', '<positive>', 'a', 'film']
    """
    counts = Counter(word for words in texts for word in words)
    kept = sorted(word for word, count in counts.items() if count >= least)
    return WordVocabulary([PAD, UNKNOWN, CLS, *CLASS_WORDS, *kept])


@dataclass(frozen=True)
class TextReader:
    """Encodes texts for a classifier, and reads the class from its output.

    Attributes:
        vocabulary: made by :func:`class_vocabulary`.
        encoder: whether the model reads the mark first and has a head for the classes; else it is a
            language model.
        longest: the most words of a text; the rest is left out. Default: 190.

    Example:
        >>> from captum_ssm.models import TextReader, class_vocabulary
        >>> vocabulary = class_vocabulary([("a", "good", "film"), ("a", "dull", "film")])
        >>> reader = TextReader(vocabulary, encoder=False)
        >>> ids = reader.ids([("a", "good", "film"), ("dull", "plot")])
        >>> [vocabulary.decode(row) for row in ids]
        ['a good film <cls>', 'dull <unk> <cls> <pad>']
        >>> reader.mark(ids).tolist()
        [3, 2]
    """

    vocabulary: WordVocabulary
    encoder: bool
    longest: int = 190

    @property
    def classes(self) -> tuple[int, int]:
        """Indices of negative and positive in the model's output at the mark."""
        if self.encoder:
            return 0, 1
        negative, positive = (self.vocabulary.id_of(word) for word in CLASS_WORDS)
        return negative, positive

    def ids(self, texts: Sequence[Sequence[str]], device: torch.device | str = "cpu") -> Tensor:
        """Return the ids of texts with the mark, padded on the right, (B, L), int64.

        Args:
            texts: the words of each text, at least one text.
            device: the tensor's device. Default: ``"cpu"``.

        Raises:
            InputError: when there is no text.
        """
        if not texts:
            raise InputError("texts is empty: pass the words of one text or more.")
        mark, word_id = [self.mark_id], self.vocabulary.id_of
        rows = []
        for words in texts:
            read = [word_id(word) for word in words[: self.longest]]
            rows.append(mark + read if self.encoder else read + mark)
        width = max(map(len, rows))
        padded = [row + [self.vocabulary.pad_id] * (width - len(row)) for row in rows]
        return torch.tensor(padded, device=device)

    @property
    def mark_id(self) -> int:
        """The id of the mark."""
        return self.vocabulary.id_of(CLS)

    def mark(self, ids: Tensor) -> Tensor:
        """Return the position of the mark in each text, (B,), from its :meth:`ids` (B, L)."""
        return (ids == self.mark_id).long().argmax(-1)

    def words(self, ids: Tensor) -> Tensor:
        """Return True for words of the text, not padding or the mark, of :meth:`ids` (B, L)."""
        return (ids != self.vocabulary.pad_id) & (ids != self.mark_id)

    def logits(self, model: Any, ids: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Return a model's logits of negative and positive, (B, 2).

        Args:
            model: a transformers model.
            ids: the result of :meth:`ids`. Padding after a language model's mark needs no mask.
            embedded: read in place of the ids' own embeddings, (B, L, E). Default: None.

        Returns:
            (B, 2), negative first.
        """
        given = {"input_ids": ids} if embedded is None else {"inputs_embeds": embedded}
        if self.encoder:
            mask = (ids != self.vocabulary.pad_id).long()
            found: Tensor = model(**given, attention_mask=mask).logits
            return found
        logits: Tensor = model(**given, use_cache=False).logits
        rows = torch.arange(len(ids), device=ids.device)
        return logits[rows, self.mark(ids)][:, list(self.classes)]
