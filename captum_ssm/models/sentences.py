"""Convert sentences to a classifier's input: the words and a special word, the mark ``<cls>``.

The class is predicted at the mark. For a language model the mark is the last word, and the class is
the predicted next word. For an encoder the mark is the first word, and the head returns the class.

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

#: The mark, a special word at whose position the model predicts the class.
CLS = "<cls>"
#: The words that language models predict for the classes "negative" and "positive".
CLASS_WORDS = ("<negative>", "<positive>")

#: Matches words with their apostrophes, numbers, and runs of marks such as ``:-)`` and ``...``.
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|(?:[^\w\s]|_)+")


def text_words(text: str) -> tuple[str, ...]:
    """Split a text into lower-case words, numbers and runs of punctuation marks.

    Args:
        text: the text to split.

    Example:
        >>> from captum_ssm.models import text_words
        >>> text_words("It's good :-)")
        ("it's", 'good', ':-)')
    """
    return tuple(_WORD.findall(text.lower()))


def class_vocabulary(texts: Iterable[Sequence[str]], least: int = 1) -> WordVocabulary:
    """Build a vocabulary: the special words, then the words of texts in alphabetical order.

    Args:
        texts: the texts, each as a list of words.
        least: the lowest number of occurrences of a word in the vocabulary. Rarer words are
            unknown. Default: 1.

    Example:
        >>> from captum_ssm.models import class_vocabulary
        >>> texts = [("a", "good", "film"), ("a", "dull", "film")]
        >>> class_vocabulary(texts, least=2).vocab
        ['<pad>', '<unk>', '<cls>', '<negative>', '<positive>', 'a', 'film']
    """
    counts = Counter(word for words in texts for word in words)
    frequent = sorted(word for word, count in counts.items() if count >= least)
    return WordVocabulary([PAD, UNKNOWN, CLS, *CLASS_WORDS, *frequent])


@dataclass(frozen=True)
class TextReader:
    """Encodes texts for a classifier, and selects the class logits from the model's output.

    Attributes:
        vocabulary: the vocabulary from :func:`class_vocabulary`.
        encoder: True for an encoder, with the mark before the text and a head for the classes;
            False for a language model, with the mark after the text.
        longest: the largest number of words of a text; further words are dropped. Default: 190.

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
        """Indices of the classes negative and positive in the model's output at the mark."""
        if self.encoder:
            return 0, 1
        negative, positive = (self.vocabulary.id_of(word) for word in CLASS_WORDS)
        return negative, positive

    def ids(self, texts: Sequence[Sequence[str]], device: torch.device | str = "cpu") -> Tensor:
        """Return the token ids (B, L) of texts and their marks, padded on the right.

        Args:
            texts: the words of each text, at least one text.
            device: the tensor's device. Default: ``"cpu"``.

        Raises:
            InputError: when ``texts`` is empty.
        """
        if not texts:
            raise InputError("texts is empty. Pass the words of at least one text.")
        mark, word_id = [self.mark_id], self.vocabulary.id_of
        rows = []
        for words in texts:
            word_ids = [word_id(word) for word in words[: self.longest]]
            rows.append(mark + word_ids if self.encoder else word_ids + mark)
        width = max(map(len, rows))
        padded = [row + [self.vocabulary.pad_id] * (width - len(row)) for row in rows]
        return torch.tensor(padded, device=device)

    @property
    def mark_id(self) -> int:
        """The token id of the mark ``<cls>``."""
        return self.vocabulary.id_of(CLS)

    def mark(self, ids: Tensor) -> Tensor:
        """Return the position of the mark in each text (B,), for token ids (B, L)."""
        return (ids == self.mark_id).long().argmax(-1)

    def words(self, ids: Tensor) -> Tensor:
        """Return a mask (B, L) of token ids: True for words, False for padding and the mark."""
        return (ids != self.vocabulary.pad_id) & (ids != self.mark_id)

    def logits(self, model: Any, ids: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Return a model's logits (B, 2) of the classes negative and positive.

        Args:
            model: a transformers model.
            ids: token ids from :meth:`ids`. A language model gets no mask, because its padding is
                after the mark.
            embedded: embeddings (B, L, E) that replace the embeddings of ``ids``. Default: None.
        """
        model_input = {"input_ids": ids} if embedded is None else {"inputs_embeds": embedded}
        if self.encoder:
            mask = (ids != self.vocabulary.pad_id).long()
            logits: Tensor = model(**model_input, attention_mask=mask).logits
            return logits
        word_logits: Tensor = model(**model_input, use_cache=False).logits  # (B, L, V)
        rows = torch.arange(len(ids), device=ids.device)
        return word_logits[rows, self.mark(ids)][:, list(self.classes)]
