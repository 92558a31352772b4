"""Circuits as games: the module's output on all inputs, coalitions, and exact Shapley values.

A player is a token that others of its kind can replace.  The value of a coalition is the mean of
the answer's logit over all inputs that agree with the example on the coalition's tokens.  The
module runs once on all inputs, so no value is sampled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from captum_ssm.tracing import repaired_scans

#: Width of the residual stream; letters of keys, and of values; where a first layer writes, and
#: where answers are written; features that center an embedding.
WIDTH, KEYS, VALUES, MIDDLE, ANSWER, BALANCE = 32, 4, 4, 20, 24, (28, 29)

#: The letters of an input, one for each token.
Letters = Sequence[int]
#: The role of a token, by its place.
Roles = Mapping[int, str]
#: Inputs that run at a time.
_AT_A_TIME = 2048


@dataclass(frozen=True)
class Words:
    """A vocabulary of kinds.  An embedding is one feature of the token and one of its kind.

    Attributes:
        kinds: how many words each kind has; the words ``"value"`` are the possible answers.
    """

    kinds: Mapping[str, int]

    @property
    def size(self) -> int:
        """How many words there are."""
        return sum(self.kinds.values())

    def ids(self, kind: str) -> range:
        """The ids of a kind's words, which are the places of their features, too."""
        before = list(self.kinds)[: list(self.kinds).index(kind)]
        first = sum(self.kinds[name] for name in before)
        return range(first, first + self.kinds[kind])

    def kind(self, kind: str) -> int:
        """The place of the feature that all words of a kind have."""
        return self.size + list(self.kinds).index(kind)

    def embeddings(self, centered: bool = False) -> Tensor:
        """Return the embeddings (words, E), all of one length, perhaps with mean 0."""
        table = torch.zeros(self.size, WIDTH)
        for kind in self.kinds:
            for word in self.ids(kind):
                table[word, [word, self.kind(kind)]] = 1
        if centered:
            table[:, list(BALANCE)] = -1
        return table


class Example(NamedTuple):
    """An input for which the program has an answer.

    Attributes:
        letters: one for each token.
        answer: the letter of the value that is explained.
        roles: the role of each token that has one.
    """

    letters: Letters
    answer: int
    roles: Roles


@dataclass(frozen=True, eq=False)
class Circuit:
    """A model, the kinds of its input, and its program.

    Attributes:
        model: a causal language model of transformers.
        words: its vocabulary.
        kinds: of the tokens of an input.
        program: the answer's letter, or -1 where the program has none, and the roles of tokens.
        chosen: whether an answered input can be an example. Default: each can.
        asked: as ``program``, where the logit of another value is explained. Default: None.
    """

    model: Any
    words: Words
    kinds: Sequence[str]
    program: Callable[[Letters], tuple[int, Roles]]
    chosen: Callable[[Letters, Roles], bool] = lambda letters, roles: True
    asked: Callable[[Letters], tuple[int, Roles]] | None = None
    _tables: list[np.ndarray[Any, Any]] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """How many words each token can be."""
        return [self.words.kinds[kind] for kind in self.kinds]

    @property
    def players(self) -> list[int]:
        """The tokens that can be another word."""
        return [place for place, size in enumerate(self.sizes) if size > 1]

    @cached_property
    def letters(self) -> np.ndarray[Any, Any]:
        """All inputs, (N, L)."""
        return np.array(list(itertools.product(*map(range, self.sizes))))

    @property
    def first_ids(self) -> np.ndarray[Any, Any]:
        """The id of the first word that each token can be, (L,)."""
        return np.array([self.words.ids(kind)[0] for kind in self.kinds])

    def ids(self, letters: Any) -> Tensor:
        """The token ids of letters (..., L)."""
        return torch.as_tensor(np.asarray(letters) + self.first_ids)

    def answer_id(self, answer: int) -> int:
        """The id of a value."""
        return self.words.ids("value")[answer]

    @cached_property
    def logits(self) -> np.ndarray[Any, Any]:
        """The logits of the values at the last token of all inputs, (N, values)."""
        with torch.no_grad(), repaired_scans():
            each = [
                self.model(input_ids=ids, use_cache=False).logits[:, -1]
                for ids in torch.split(self.ids(self.letters), _AT_A_TIME)
            ]
        values = torch.cat(each)[:, list(self.words.ids("value"))]
        return values.double().numpy()

    def checked(self) -> tuple[int, float]:
        """Return how many inputs have an answer, and the least margin of its logit over others."""
        said = np.array([self.program(letters.tolist())[0] for letters in self.letters])
        rows = np.flatnonzero(said >= 0)
        logits = self.logits[rows].copy()
        right = logits[range(len(rows)), said[rows]].copy()
        logits[range(len(rows)), said[rows]] = -np.inf
        return len(rows), float((right - logits.max(1)).min())

    def coalitions(self, example: Example) -> np.ndarray[Any, Any]:
        """The value of each coalition, of shape (2,) * players: without, and with each."""
        table = self.logits.reshape(*self.sizes, -1)[..., example.answer]
        for axis, (size, letter) in enumerate(zip(self.sizes, example.letters, strict=True)):
            kept = table.take([letter], axis)
            mean = table.mean(axis, keepdims=True)
            table = kept if size == 1 else np.concatenate([mean, kept], axis)
        return table.reshape([2] * len(self.players))

    def example(self, index: int, seed: int) -> Example:
        """One of the inputs that can be examples, in an order by ``seed``."""
        order = np.random.default_rng(seed).permutation(len(self.letters)).tolist()
        program = self.asked or self.program
        each = (Example(letters, *program(letters)) for letters in self.letters[order].tolist())
        fit = (one for one in each if one.answer >= 0 and self.chosen(one.letters, one.roles))
        return next(itertools.islice(fit, index, None))


def shapley(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the Shapley values (n,) of a game of shape (2,) * n."""
    n, size = value.ndim, np.indices(value.shape).sum(0)
    weight = np.array([1 / (n * math.comb(n - 1, s)) for s in range(n)])
    each = [
        ((value.take(1, i) - value.take(0, i)) * weight[size.take(0, i)]).sum() for i in range(n)
    ]
    return np.array(each)


def left_out(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return by how much the value falls without each player alone, (n,)."""
    n = value.ndim
    full = value[(1,) * n]
    return np.array([full - value[tuple(int(i != j) for j in range(n))] for i in range(n)])
