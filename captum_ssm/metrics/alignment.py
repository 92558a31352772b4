"""Word alignment: do translated words come from the words they translate (LATIM, table 3)?

::

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|)

for predicted links A, sure links S and possible links P, of which S is a part (Och and Ney 2003).
Published rates are of the links of all sentences together.

Shapes: B sentences, T target words, S source words of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..operators.kernels.arithmetic import doubled
from .checks import as_flags, as_mask, as_scores, masked_scores
from .sample import Interval, Sample


def best_links(maps: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return links from each target word to its most relevant source word, (B, T, S) of booleans.

    If several are equally relevant, all are linked: a constant row is penalized.

    Args:
        maps: relevance of source words for target words, (B, T, S).
        mask: pairs of real words, (B, T, S). Default: None, all.

    Returns:
        (B, T, S); a target word without a real source word has no link.

    Raises:
        InputError: when maps is not (B, T, S), or mask is not of its shape.
        NonFiniteError: when maps holds NaN or infinity at a pair of real words.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import best_links
        >>> best_links(torch.tensor([[[0.9, 0.1], [0.4, 0.4]]])).tolist()
        [[[True, False], [True, True]]]
    """
    scores, real = masked_scores(maps, mask, "maps", dims=3)
    best = scores.masked_fill(~real, float("-inf")).amax(-1, keepdim=True)
    return (scores == best) & real


def words_of_tokens(
    maps: Tensor, target_words: Sequence[int], source_words: Sequence[int]
) -> Tensor:
    """Return a map over words from a map over tokens: sums over source, means over target tokens.

    A source word's relevance is the sum over its tokens, a target word's row the mean over its
    tokens (Ferrando et al. 2022)::

        words[t, s] = mean over the tokens i of t of the sum over the tokens j of s of maps[i, j]

    Args:
        maps: (..., T', S') over tokens.
        target_words: the word, from 0, that each target token is a part of; -1 for none.
        source_words: the word of each source token, from 0; -1 for none.

    Returns:
        (..., T, S); words without a token are rows or columns of 0.

    Raises:
        InputError: when there is not one word per token, or a word is not an integer from -1.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import words_of_tokens
        >>> tokens = torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
        >>> words_of_tokens(tokens, target_words=[0, 0], source_words=[0, 0, 1]).tolist()
        [[5.0, 4.0]]
    """
    scores = as_scores(maps, "maps")
    if scores.shape[-2:] != (len(target_words), len(source_words)):
        raise InputError(
            f"maps has shape {tuple(scores.shape)}, but target_words names {len(target_words)} and "
            f"source_words {len(source_words)} tokens."
        )
    rows = _membership(target_words, "target_words").to(scores)  # (T', T)
    columns = _membership(source_words, "source_words").to(scores)
    return (rows / rows.sum(0).clamp_min(1)).T @ scores @ columns


class LinkCounts(NamedTuple):
    """The counts of an alignment error rate, one number per sentence, (B,).

    Attributes:
        predicted: ``|A|``.
        sure: ``|S|``.
        hit_sure: ``|A & S|``.
        hit_possible: ``|A & P|``.
    """

    predicted: Tensor
    sure: Tensor
    hit_sure: Tensor
    hit_possible: Tensor


def link_counts(predicted: Tensor, sure: Tensor, possible: Tensor | None = None) -> LinkCounts:
    """Count predicted and gold links.

    Args:
        predicted: links (B, T, S) of booleans, as of :func:`best_links`.
        sure: sure gold links, (B, T, S).
        possible: possible gold links, (B, T, S); sure links are possible even if not marked.
            Default: None, the sure links alone.

    Returns:
        :class:`LinkCounts`, (B,) each.

    Raises:
        InputError: when the shapes differ, or an entry is neither 0 nor 1.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import link_counts
        >>> predicted = torch.tensor([[[1, 0], [0, 1]]])
        >>> sure = torch.tensor([[[1, 0], [1, 0]]])
        >>> [count.item() for count in link_counts(predicted, sure)]
        [2, 2, 1, 1]
    """
    given = as_flags(predicted, predicted, "predicted")
    if given.dim() != 3:
        raise InputError(f"predicted has shape {tuple(given.shape)}; (B, T, S) is needed.")
    certain = as_flags(sure, given, "sure")
    allowed = certain if possible is None else certain | as_flags(possible, given, "possible")
    parts = (given, certain, given & certain, given & allowed)
    return LinkCounts(*(part.sum((1, 2)) for part in parts))


class Alignment(NamedTuple):
    """Rates of an alignment.

    Attributes:
        error_rate: AER; NaN if there are neither predicted nor sure links.
        precision: ``|A & P| / |A|``; NaN without predicted links.
        recall: ``|A & S| / |S|``; NaN without sure links.
    """

    error_rate: Tensor
    precision: Tensor
    recall: Tensor


def alignment_rates(counts: LinkCounts) -> Alignment:
    """Return the rates of each sentence, (B,), or of sums over sentences.

    ::

        AER       = 1 - (|A & S| + |A & P|) / (|A| + |S|)
        precision = |A & P| / |A|
        recall    = |A & S| / |S|

    Args:
        counts: as of :func:`link_counts`, each of one shape (...).

    Returns:
        :class:`Alignment`, (...) each, float64.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import LinkCounts, alignment_rates
        >>> counts = LinkCounts(*torch.tensor([4, 2, 1, 2]))  # |A|, |S|, |A & S|, |A & P|
        >>> [rate.item() for rate in alignment_rates(counts)]
        [0.5, 0.5, 0.5]
    """
    return Alignment(*_rates(doubled(torch.stack(counts, -1))).unbind(-1))


def link_accuracy(maps: Tensor, gold: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the share of target words whose most relevant source word is linked to them, (B,).

    A word whose best sources are tied counts by the share of them that are linked.

    Args:
        maps: (B, T, S).
        gold: links that count as right, (B, T, S).
        mask: pairs of real words, (B, T, S). Default: None, all.

    Returns:
        (B,); words without a gold link do not count; NaN for a sentence without a gold link.

    Raises:
        InputError: when the shapes differ, or gold holds something but 0 and 1.
        NonFiniteError: when maps holds NaN or infinity at a pair of real words.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import link_accuracy
        >>> maps = torch.tensor([[[0.9, 0.1], [0.4, 0.4]]])  # the second row is tied
        >>> link_accuracy(maps, gold=torch.eye(2)[None]).item()
        0.75
    """
    best = best_links(maps, mask)
    linked = as_flags(gold, best, "gold") & as_mask(mask, best)
    share = (best & linked).sum(-1).double() / best.sum(-1).clamp_min(1)
    counts = linked.any(-1)
    return (share * counts).sum(-1) / counts.sum(-1)


class AlignmentScores:
    """Gathers :class:`Alignment` over batches of sentences, as rates of all links together.

    Raises:
        InputError: when rates are read before the first sentence.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import AlignmentScores, best_links
        >>> scores = AlignmentScores()
        >>> links = best_links(torch.tensor([[[0.9, 0.1], [0.2, 0.8]]]))
        >>> scores.update(links, sure=torch.tensor([[[1, 0], [1, 0]]]))
        >>> [round(float(rate), 2) for rate in scores.compute()]
        [0.5, 0.5, 0.5]
    """

    def __init__(self) -> None:
        self._sample = Sample(_sample_rates)

    def update(self, predicted: Tensor, sure: Tensor, possible: Tensor | None = None) -> None:
        """Add sentences; see :func:`link_counts`."""
        self._sample.update(torch.stack(link_counts(predicted, sure, possible), -1))

    def merge(self, other: AlignmentScores) -> None:
        """Add the sentences of another :class:`AlignmentScores`."""
        self._sample.merge(other._sample)

    def compute(self) -> Alignment:
        """Return the rates of all sentences, each a tensor without dimensions."""
        return Alignment(*self._sample.value().unbind(-1))

    def interval(
        self, confidence: float = 0.95, *, resamples: int = 1000, seed: int = 0
    ) -> Interval:
        """Return bounds of the rates, as :meth:`~captum_ssm.metrics.Sample.interval`."""
        return self._sample.interval(confidence, resamples=resamples, seed=seed)


def best_layer(rates: Sequence[float]) -> int:
    """Return the index of the layer with the lowest error rate, the first of equal layers.

    The paper's table takes the best layer on the test data; choose it on other data to claim more.

    Args:
        rates: the error rate of each layer, NaN for none.

    Returns:
        The layer's index.

    Raises:
        InputError: when no layer has a rate.

    Example:
        >>> from captum_ssm.metrics import best_layer
        >>> best_layer([float("nan"), 0.4, 0.2, 0.2])
        2
    """
    known = [(float(rate), layer) for layer, rate in enumerate(rates) if float(rate) == float(rate)]
    if not known:
        raise InputError(f"rates={list(rates)!r}: there is no rate to choose from.")
    return min(known)[1]


def _rates(counts: Tensor) -> Tensor:
    """Return alignment error rate, precision and recall (..., 3) of counts (..., 4)."""
    predicted, sure, hit_sure, hit_possible = counts.unbind(-1)
    error = 1 - (hit_sure + hit_possible) / (predicted + sure)
    return torch.stack([error, hit_possible / predicted, hit_sure / sure], -1)


def _sample_rates(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the three rates of counts that are summed over sentences."""
    return _rates(sums)


def _membership(words: Sequence[int], name: str) -> Tensor:
    """Return a matrix (tokens, words), 1 at the word of each token and else 0."""
    index = torch.as_tensor(words)
    if index.dim() != 1 or not len(index) or index.is_floating_point() or int(index.min()) < -1:
        raise InputError(f"{name}={list(words)!r}: pass a word from 0, or -1, for each token.")
    return (index[:, None] == torch.arange(int(index.max()) + 1)).float()
