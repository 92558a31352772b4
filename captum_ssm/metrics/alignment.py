"""Measure how well maps link translated words to their source words (LATIM, table 3).

::

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|)

for predicted links A, sure links S and possible links P, which include S (Och and Ney 2003).
Published rates are computed from the links of all sentences together.

Shapes: B sentences; T and S are the largest numbers of target and source words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..operators.kernels.arithmetic import doubled
from .checks import as_flags, as_mask, as_scores, masked_scores


def best_links(maps: Tensor, mask: Tensor | None = None) -> Tensor:
    """Link each target word to its most relevant source word.

    If several source words are equally relevant, all are linked, so a constant row has many links.

    Args:
        maps: relevance of source words for target words, (B, T, S).
        mask: True for pairs of words that are not padding, (B, T, S). Default: None, all.

    Returns:
        Booleans (B, T, S); a target word without a real source word has no link.

    Raises:
        InputError: when maps is not (B, T, S), or the shapes of mask and maps differ.
        NonFiniteError: when maps contains NaN or infinity at a pair of real words.

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
    """Convert a map over tokens to a map over words (Ferrando et al. 2022).

    The relevance of a source word is the sum over its tokens, and the row of a target word is the
    mean over its tokens::

        words[t, s] = mean over the tokens i of t of the sum over the tokens j of s of maps[i, j]

    Args:
        maps: relevance of source tokens for target tokens, (..., T', S').
        target_words: for each target token, the index of its word, or -1 if it belongs to no word.
        source_words: for each source token, the index of its word, or -1 if it belongs to no word.

    Returns:
        A map over words, (..., T, S). Rows and columns of words without a token are 0.

    Raises:
        InputError: when the number of indices and tokens differs, or an index is not -1, 0, 1, ...

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
            f"maps has shape {tuple(scores.shape)}, but target_words has {len(target_words)} and "
            f"source_words {len(source_words)} entries. Pass one entry per token."
        )
    targets = _membership(target_words, "target_words").to(scores)  # (T', T)
    sources = _membership(source_words, "source_words").to(scores)  # (S', S)
    # divided by the tokens of each target word; a word without tokens keeps a row of zeros
    return (targets / targets.sum(0).clamp_min(1)).T @ scores @ sources


class LinkCounts(NamedTuple):
    """The counts from which an alignment error rate is computed, for each sentence (B,).

    Attributes:
        predicted: ``|A|``, the number of predicted links.
        sure: ``|S|``, the number of sure links.
        hit_sure: ``|A & S|``, the number of predicted links that are sure.
        hit_possible: ``|A & P|``, the number of predicted links that are possible.
    """

    predicted: Tensor
    sure: Tensor
    hit_sure: Tensor
    hit_possible: Tensor


def link_counts(predicted: Tensor, sure: Tensor, possible: Tensor | None = None) -> LinkCounts:
    """Count predicted links, sure links, and predicted links that are right.

    Args:
        predicted: predicted links, booleans (B, T, S), for example from :func:`best_links`.
        sure: sure gold links, (B, T, S).
        possible: possible gold links, (B, T, S); sure links always count as possible. Default:
            None, only the sure links.

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
    links = as_flags(predicted, predicted, "predicted")
    if links.dim() != 3:
        raise InputError(f"predicted has shape {tuple(links.shape)}. Pass a tensor (B, T, S).")
    certain = as_flags(sure, links, "sure")
    allowed = certain if possible is None else certain | as_flags(possible, links, "possible")
    link_sets = (links, certain, links & certain, links & allowed)
    return LinkCounts(*(flags.sum((1, 2)) for flags in link_sets))


class Alignment(NamedTuple):
    """The alignment error rate, precision and recall of links.

    Attributes:
        error_rate: the alignment error rate (AER); NaN if there are no predicted and no sure links.
        precision: ``|A & P| / |A|``; NaN without predicted links.
        recall: ``|A & S| / |S|``; NaN without sure links.
    """

    error_rate: Tensor
    precision: Tensor
    recall: Tensor


def alignment_rates(counts: LinkCounts) -> Alignment:
    """Compute alignment error rate, precision and recall from counts.

    ::

        AER       = 1 - (|A & S| + |A & P|) / (|A| + |S|)
        precision = |A & P| / |A|
        recall    = |A & S| / |S|

    Args:
        counts: the result of :func:`link_counts`, or sums of it over sentences; tensors of one
            shape (...).

    Returns:
        :class:`Alignment`, with float64 tensors (...).

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import LinkCounts, alignment_rates
        >>> counts = LinkCounts(*torch.tensor([4, 2, 1, 2]))  # |A|, |S|, |A & S|, |A & P|
        >>> [rate.item() for rate in alignment_rates(counts)]
        [0.5, 0.5, 0.5]
    """
    predicted, sure, hit_sure, hit_possible = map(doubled, counts)
    error = 1 - (hit_sure + hit_possible) / (predicted + sure)
    return Alignment(error, hit_possible / predicted, hit_sure / sure)


def link_accuracy(maps: Tensor, gold: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the share of target words whose most relevant source word has a gold link to them.

    If several source words are equally relevant, the share of them with a gold link counts.

    Args:
        maps: relevance of source words for target words, (B, T, S).
        gold: the right links, (B, T, S).
        mask: True for pairs of real words, (B, T, S). Default: None, all.

    Returns:
        Shares (B,) of the target words with a gold link; NaN for a sentence without a gold link.

    Raises:
        InputError: when the shapes differ, or gold has an entry other than 0 and 1.
        NonFiniteError: when maps contains NaN or infinity at a pair of real words.

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
    has_gold = linked.any(-1)
    return (share * has_gold).sum(-1) / has_gold.sum(-1)


def _membership(words: Sequence[int], name: str) -> Tensor:
    """Return a matrix (tokens, words) that is 1 at the word of each token and 0 elsewhere."""
    index = torch.as_tensor(words)
    if index.dim() != 1 or not len(index) or index.is_floating_point() or int(index.min()) < -1:
        raise InputError(f"{name}={list(words)!r}: pass a word's index, or -1, for each token.")
    return (index[:, None] == torch.arange(int(index.max()) + 1)).float()
