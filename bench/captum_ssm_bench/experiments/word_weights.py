"""A weight for each word, by logistic regression: the classifier that needs no explanation.

Shapes: N texts, T words of all of them, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.models.sentences import TextReader
from captum_ssm.models.vocabulary import WordVocabulary

from ..data.valence import RatedText

#: Weight of the loss against that of the squared weights, scikit-learn's C.
TRUST = 3.0
_STEPS = 100


@dataclass(frozen=True, eq=False)
class WordWeights:
    """What the occurrence of a word speaks for: above 0 for positive, below for negative.

    Attributes:
        weights: the regression's weight times the inverse document frequency, (V,), float64.
    """

    weights: Tensor

    @classmethod
    def of(cls, texts: Sequence[RatedText], vocabulary: WordVocabulary) -> WordWeights:
        """Fitted to texts whose words are counted, weighted by rarity and divided by their norm.

        Args:
            texts: some of each label.
            vocabulary: the words that have weights of their own.
        """
        bags = [torch.tensor([vocabulary.id_of(word) for word in text.words]) for text in texts]
        frequency = torch.zeros(len(vocabulary), dtype=torch.float64)
        for bag in bags:
            frequency[torch.unique(bag)] += 1
        rarity = 1 + ((1 + len(texts)) / (1 + frequency)).log()
        norms = [_norm(bag, rarity) for bag in bags]
        shares = torch.cat([rarity[bag] / norm for bag, norm in zip(bags, norms, strict=True)])
        labels = torch.tensor([float(text.label) for text in texts], dtype=torch.float64)
        return cls(_fitted(bags, shares, labels, len(vocabulary)) * rarity)

    def relevance(self, reader: TextReader, ids: Tensor, label: int) -> Tensor:
        """What each token of a text (L,) speaks for its label, (L,); 0 for what is no word.

        Args:
            reader: how the text was read, by the same vocabulary.
            ids: of the text.
            label: 0 for negative, 1 for positive.
        """
        return (self.weights[ids] if label else -self.weights[ids]) * reader.words(ids)


def _norm(bag: Tensor, rarity: Tensor) -> Tensor:
    """The length of a text's vector of counts, weighted by rarity."""
    words, counts = torch.unique(bag, return_counts=True)
    norm: Tensor = torch.linalg.vector_norm(counts * rarity[words])
    return norm


def _fitted(bags: Sequence[Tensor], shares: Tensor, labels: Tensor, size: int) -> Tensor:
    """The weights of the regression, (V,).

    Args:
        bags: the words of each text.
        shares: what each adds to its text's vector, (T,).
        labels: 0 or 1, (N,).
        size: V.
    """
    words = torch.cat(list(bags))
    starts = torch.tensor([0, *map(len, bags)]).cumsum(0)[:-1]
    weights = torch.zeros(size, 1, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weights, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        margins = F.embedding_bag(words, weights, starts, mode="sum", per_sample_weights=shares)
        fit = F.binary_cross_entropy_with_logits(margins[:, 0] + bias, labels, reduction="sum")
        total = TRUST * fit + weights.square().sum() / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()[:, 0]
