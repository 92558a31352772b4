"""Texts whose last words follow from known earlier ones, and what all tasks made of them share.

A text is a prompt and its answer.  The logits at the last word of the prompt predict the first
word of the answer, those at each word of the answer the next one; for each answered word it is
known which words of the prompt it follows from.

Shapes: B texts, L tokens of the longest, T answered tokens of all texts together, K pairs of an
answered token and a source of it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captum_ssm.models.vocabulary import PAD, WordVocabulary

SEPARATOR = "|"

#: Words that can stand in each other's place, each as a source and what follows from it.
Family = Sequence[tuple[str, str]]


class LinkedTask(ABC):
    """Base of the tasks on texts: draws examples of one form and of many lengths.

    A length counts tokens, symbols, digits or facts, as the task says.

    Attributes:
        shortest: the least length that is drawn.
        longest: the greatest length.
    """

    shortest: int
    longest: int

    @property
    @abstractmethod
    def words(self) -> Iterable[str]:
        """All words of the task's texts, in the order of their ids."""

    @property
    @abstractmethod
    def families(self) -> Sequence[Family]:
        """Sources that can be exchanged for each other, each with the word that then follows."""

    @abstractmethod
    def example(self, rng: random.Random, length: int) -> Any:
        """One example, in the task's own form."""

    def linked(self, example: Any) -> LinkedText:
        """The text of an example; the example itself, if the task draws texts."""
        text: LinkedText = example
        return text

    @property
    def vocabulary(self) -> WordVocabulary:
        """Padding and the words."""
        return _vocabulary(tuple(dict.fromkeys(self.words)))

    def draw(self, count: int, seed: int | random.Random, length: int | None = None) -> list[Any]:
        """Examples of one length, or of lengths drawn anew for each; the same seed, the same ones.

        Args:
            count: how many.
            seed: a seed, or a generator to go on drawing from.
            length: of every example. Default: None, drawn anew for each.

        Returns:
            The examples, in the task's own form, which :meth:`batch` takes.

        """
        rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        lengths = (length or rng.randint(self.shortest, self.longest) for _ in range(count))
        return [self.example(rng, n) for n in lengths]

    def batch(self, examples: Sequence[Any]) -> LinkedBatch:
        """The texts of examples, padded on the left.

        Args:
            examples: at least one.

        Returns:
            The texts as ids, with the links of their answers.
        """
        return LinkedBatch.of(self, [self.linked(example) for example in examples])


@cache
def _vocabulary(words: tuple[str, ...]) -> WordVocabulary:
    return WordVocabulary([PAD, *words])


@dataclass(frozen=True)
class LinkedText:
    """A prompt, its answer, and where the words of the answer come from.

    Attributes:
        words: of the prompt and the answer.
        answer: the position of the first answered word; all from there on are answered.
        context: the positions among which sources are looked for.
        sure: pairs of the position of an answered word and of a source it surely has.
        possible: further pairs, which it is no error to name. Default: none.
    """

    words: tuple[str, ...]
    answer: int
    context: range
    sure: tuple[tuple[int, int], ...]
    possible: tuple[tuple[int, int], ...] = ()

    @property
    def prompt(self) -> str:
        """The words before the answer."""
        return " ".join(self.words[: self.answer])

    @property
    def completion(self) -> str:
        """The words of the answer."""
        return " ".join(self.words[self.answer :])


class Targets(NamedTuple):
    """All answered tokens of a batch, row by row and left to right, each tensor (T,).

    Attributes:
        rows: which text of the batch.
        queries: the position whose logits predict the token.
        tokens: its id.
    """

    rows: Tensor
    queries: Tensor
    tokens: Tensor


class Links(NamedTuple):
    """Answered tokens of a batch and where they come from, each tensor (K,).

    A token with several sources has several links.

    Attributes:
        rows: which text of the batch.
        queries: the position whose logits predict the answered token.
        sources: the position of its gold source.
        tokens: its id.
    """

    rows: Tensor
    queries: Tensor
    sources: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class LinkedBatch:
    """Texts padded on the left, and their links.

    Attributes:
        task: what the texts were drawn for.
        input_ids: ids (B, L).
        context: the positions among which sources are looked for, (B, L) of booleans.
        targets: the answered tokens.
        links: the sure links.
        possible_links: those that are possible and not sure.
    """

    task: LinkedTask
    input_ids: Tensor
    context: Tensor
    targets: Targets
    links: Links
    possible_links: Links

    @classmethod
    def of(cls, task: LinkedTask, texts: Sequence[LinkedText]) -> LinkedBatch:
        """Texts over the task's vocabulary, padded to the longest."""
        words, width = task.vocabulary, max(len(text.words) for text in texts)
        input_ids = torch.full((len(texts), width), words.pad_id)
        context = torch.zeros_like(input_ids, dtype=torch.bool)
        targets: list[tuple[int, int]] = []
        sure: list[tuple[int, int, int]] = []
        possible: list[tuple[int, int, int]] = []
        for row, text in enumerate(texts):
            start = width - len(text.words)
            input_ids[row, start:] = torch.tensor([words.id_of(word) for word in text.words])
            context[row, start + text.context.start : start + text.context.stop] = True
            # the logits at a token predict the next one
            targets += [(row, position - 1) for position in range(start + text.answer, width)]
            for found, pairs in ((sure, text.sure), (possible, text.possible)):
                found += [(row, start + to - 1, start + source) for to, source in sorted(pairs)]
        rows, queries = _columns(targets, 2)
        return cls(
            task=task,
            input_ids=input_ids,
            context=context,
            targets=Targets(rows, queries, input_ids[rows, queries + 1]),
            links=_links(sure, input_ids),
            possible_links=_links(possible, input_ids),
        )

    @property
    def attention_mask(self) -> Tensor:
        """1 for tokens and 0 for padding, (B, L)."""
        return (self.input_ids != self.task.vocabulary.pad_id).long()

    def gold(self, diagonals: int = 1) -> Tensor:
        """The sure links as a map (B, L, L) of booleans: row i, the sources of the logits at i.

        LATIM's table 2 has ones along the three main diagonals of the copy-source block, because
        a source may be written to the state at its neighbor.  The paper does not say whether its
        rows are the tokens that predict, as here, or the tokens predicted, one further right.

        Args:
            diagonals: an odd number; with 3 the neighbors of a source in the context are sources,
                too. Default: 1, the source alone.
        """
        rows, queries, sources, tokens = self.links
        gold = torch.zeros_like(self._map(self.links))
        for shift in range(-(diagonals // 2), diagonals // 2 + 1):
            near = sources + shift
            inside = near.clamp(0, gold.shape[-1] - 1)
            within = (near == inside) & self.context[rows, inside]
            kept = (each[within] for each in (rows, queries, near, tokens))
            gold |= self._map(Links(*kept))
        return gold

    def possible(self) -> Tensor:
        """The sure and the possible links, as :meth:`gold`."""
        return self.gold() | self._map(self.possible_links)

    def pairs(self) -> Tensor:
        """Pairs of a query and a word that may be its source, (B, L, L) of booleans."""
        queries = torch.zeros_like(self.context)
        queries[self.targets.rows, self.targets.queries] = True
        return queries[:, :, None] & self.context[:, None, :]

    def _map(self, links: Links) -> Tensor:
        count, width = self.input_ids.shape
        found = torch.zeros(count, width, width, dtype=torch.bool, device=self.input_ids.device)
        found[links.rows, links.queries, links.sources] = True
        return found


def _columns(rows: Sequence[tuple[int, ...]], count: int) -> tuple[Tensor, ...]:
    return torch.tensor(rows, dtype=torch.long).reshape(-1, count).unbind(1)


def _links(pairs: Sequence[tuple[int, int, int]], input_ids: Tensor) -> Links:
    rows, queries, sources = _columns(pairs, 3)
    return Links(rows, queries, sources, input_ids[rows, queries + 1])
