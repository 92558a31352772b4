"""Measure how high scores rank true units, and how well two rankings agree.

All functions take a batch: scores (B, N), gold (B, N) and, for padded examples, a mask (B, N). They
return one float64 number per example, (B,). Results do not depend on the order of the units, also
if scores are equal. For constant scores, ROC AUC is 0.5, and average precision and recall at K have
their chance values. Undefined results are NaN, for example if no unit is true;
:class:`~captum_ssm.metrics.Sample` excludes and counts such examples.

Shapes: B examples, N units per example, such as tokens or pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .checks import as_flags, check_positive, masked_scores


def roc_auc(scores: Tensor, gold: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the area under the ROC curve of each example.

    ::

        mean over true units t and false units f of [s_t > s_f] + [s_t = s_f] / 2

    Args:
        scores: the score of each unit, (B, N).
        gold: the true units, (B, N), as booleans or 0 and 1.
        mask: True for the units to use, (B, N). Default: None, all.

    Returns:
        Areas (B,); NaN if no unit is true, or every unit is true.

    Raises:
        InputError: when the shapes differ, or gold has an entry other than 0 and 1.
        NonFiniteError: when a score is NaN or infinite where mask is True.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import roc_auc
        >>> roc_auc(torch.tensor([[0.9, 0.6, 0.4, 0.1]]), torch.tensor([[1, 0, 1, 0]])).item()
        0.75
    """
    scores, true, false = _split_gold(scores, gold, mask)
    # the sorted scores of false units; true units come last as infinity
    false_scores = scores.masked_fill(~false, float("inf")).sort(-1).values
    below = torch.searchsorted(false_scores, scores)
    up_to = torch.searchsorted(false_scores, scores, right=True)
    wins = (below + up_to).double() / 2  # the lower false units; an equal one counts 1/2
    pairs = true.sum(-1).double() * false.sum(-1)
    return (wins * true).sum(-1) / pairs  # 0 / 0 is NaN


def average_precision(scores: Tensor, gold: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the average precision: the mean precision at the scores of the true units.

    This is the area under the precision-recall curve, without interpolation::

        mean over true units t of |{true u: s_u >= s_t}| / |{u: s_u >= s_t}|

    Args:
        scores: the score of each unit, (B, N).
        gold: the true units, (B, N), as booleans or 0 and 1.
        mask: True for the units to use, (B, N). Default: None, all.

    Returns:
        Average precisions (B,); NaN if no unit is true, 1 if every unit is true.

    Raises:
        InputError, NonFiniteError: see :func:`roc_auc`.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import average_precision
        >>> scores, gold = torch.tensor([[0.9, 0.6, 0.4, 0.2]]), torch.tensor([[1, 0, 0, 1]])
        >>> average_precision(scores, gold).item()  # the mean of 1 / 1 and 2 / 4
        0.75
    """
    scores, true, false = _split_gold(scores, gold, mask)
    precision = _count_at_least(scores, true).double() / _count_at_least(scores, true | false)
    return precision.where(true, 0).sum(-1) / true.sum(-1)


def recall_at_k(
    scores: Tensor, gold: Tensor, k: int | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return the share of true units that are among the K highest scores (Fomicheva et al. 2021).

    If several units have the K-th highest score, the result is the expectation over their orders.

    Args:
        scores: the score of each unit, (B, N).
        gold: the true units, (B, N), as booleans or 0 and 1.
        k: the number K of units. Default: None, the number of true units in each example.
        mask: True for the units to rank, (B, N). Default: None, all.

    Returns:
        Recalls (B,); NaN if no unit is true.

    Raises:
        InputError, NonFiniteError: see :func:`roc_auc`.
        OptionError: when k is below 1.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import recall_at_k
        >>> scores, gold = torch.tensor([[0.9, 0.6, 0.4, 0.2]]), torch.tensor([[1, 0, 0, 1]])
        >>> recall_at_k(scores, gold).item(), recall_at_k(scores, gold, k=4).item()
        (0.5, 1.0)
    """
    hits, _, true_count = _hits_in_top_k(scores, gold, k, mask)
    return hits / true_count


def precision_at_k(
    scores: Tensor, gold: Tensor, k: int | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return the share of true units among the K highest scores; K = 1 is the top-1 accuracy.

    Args:
        scores, gold, k, mask: see :func:`recall_at_k`, with the same defaults.

    Returns:
        Shares (B,); NaN if K is 0 or no unit is ranked.

    Raises:
        InputError, NonFiniteError, OptionError: see :func:`recall_at_k`.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import precision_at_k
        >>> scores, gold = torch.tensor([[0.9, 0.6, 0.4, 0.2]]), torch.tensor([[1, 0, 0, 1]])
        >>> precision_at_k(scores, gold, k=1).item(), precision_at_k(scores, gold, k=4).item()
        (1.0, 0.5)
    """
    hits, top_count, _ = _hits_in_top_k(scores, gold, k, mask)
    return hits / top_count


def pearson(scores: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Pearson's correlation between two sets of scores of the same units.

    Args:
        scores: the score of each unit, (B, N).
        others: the second scores of the same units, (B, N).
        mask: True for the units to use, (B, N). Default: None, all.

    Returns:
        Correlations (B,); NaN if all scores of an example are equal in either argument.

    Raises:
        InputError: when the shapes differ.
        NonFiniteError: when a score is NaN or infinite where mask is True.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import pearson
        >>> pearson(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 6.0]])).item()
        0.944911182523068
    """
    return _correlation(*_as_pair(scores, others, mask))


def spearman(scores: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Spearman's rank correlation; equal scores have their mean rank.

    Args:
        scores, others, mask: see :func:`pearson`, with the same defaults.

    Returns:
        Correlations (B,); NaN if all scores of an example are equal in either argument.

    Raises:
        InputError, NonFiniteError: see :func:`pearson`.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import spearman
        >>> spearman(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 6.0]])).item()
        1.0
    """
    first, second, used = _as_pair(scores, others, mask)
    return _correlation(_ranks(first, used), _ranks(second, used), used)


def kendall(scores: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Kendall's rank correlation tau-b; time and memory grow with the square of N.

    Args:
        scores, others, mask: see :func:`pearson`, with the same defaults.

    Returns:
        Correlations (B,); NaN if all scores of an example are equal in either argument.

    Raises:
        InputError, NonFiniteError: see :func:`pearson`.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import kendall
        >>> scores, others = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1, 3, 2, 4]])
        >>> round(kendall(scores, others).item(), 3)  # one of six pairs is in a different order
        0.667
    """
    first, second, used = _as_pair(scores, others, mask)
    pairs = used[:, :, None] & used[:, None]
    # signs of the differences between units, (B, N, N)
    a, b = ((x[:, :, None] - x[:, None]).sign() * pairs for x in (first, second))
    agreement = (a * b).sum((1, 2))
    return agreement / (a.abs().sum((1, 2)) * b.abs().sum((1, 2))).sqrt()


def _split_gold(scores: Tensor, gold: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (B, N), a mask of the true units, and a mask of the false units."""
    scores, used = masked_scores(scores, mask, "scores", dims=2)
    true = as_flags(gold, scores, "gold")
    return scores.contiguous(), true & used, ~true & used


def _as_pair(scores: Tensor, others: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return both scores in float64, and the mask of the units to use, each (B, N)."""
    first, used = masked_scores(scores, mask, "scores", dims=2)
    second, _ = masked_scores(others, mask, "others", dims=2)
    if first.shape != second.shape:
        raise InputError(
            f"scores has shape {tuple(first.shape)}, but others has {tuple(second.shape)}. Pass "
            "two scores of the same units."
        )
    return first.double(), second.to(first.device).double(), used


def _correlation(first: Tensor, second: Tensor, used: Tensor) -> Tensor:
    """Return Pearson's correlation over the units where ``used`` is True, (B,)."""
    x, y = (_centered(scores, used) for scores in (first, second))
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def _centered(scores: Tensor, used: Tensor) -> Tensor:
    """Return scores minus their mean over the units where ``used`` is True; 0 elsewhere."""
    # first subtract the minimum, so that equal scores become exactly 0 without rounding error
    scores = scores - scores.masked_fill(~used, float("inf")).amin(-1, keepdim=True)
    scores = scores.where(used, 0)
    return (scores - scores.sum(-1, keepdim=True) / used.sum(-1, keepdim=True)).where(used, 0)


def _ranks(scores: Tensor, used: Tensor) -> Tensor:
    """Return 2 * rank - 1 of each unit, (B, N): an integer even if ties share a mean rank."""
    rising = scores.masked_fill(~used, float("inf")).sort(-1).values
    below = torch.searchsorted(rising, scores.contiguous())
    up_to = torch.searchsorted(rising, scores.contiguous(), right=True)
    return (below + up_to).double()


def _count_at_least(scores: Tensor, among: Tensor) -> Tensor:
    """Return for each unit the number of units in ``among`` with an equal or higher score."""
    rising = scores.masked_fill(~among, float("-inf")).sort(-1).values
    return scores.shape[-1] - torch.searchsorted(rising, scores)


def _hits_in_top_k(
    scores: Tensor, gold: Tensor, k: int | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts per example: expected true units in the top K, K, and all true units."""
    if k is not None:
        check_positive(k, "k")
    scores, true, false = _split_gold(scores, gold, mask)
    ranked = true | false
    total = true.sum(-1)
    top_count = (total if k is None else torch.full_like(total, k)).minimum(ranked.sum(-1))
    falling = scores.masked_fill(~ranked, float("-inf")).sort(-1, descending=True).values
    kth_score = falling.gather(-1, (top_count - 1).clamp_min(0)[:, None])
    above, tied = ranked & (scores > kth_score), ranked & (scores == kth_score)
    # of the units with the K-th score, only `room` fit into the top K: each has this chance
    room = (top_count - above.sum(-1)).double()
    share = room / tied.sum(-1).clamp_min(1)
    hits = (above & true).sum(-1) + share * (tied & true).sum(-1)
    return hits.where(top_count > 0, 0), top_count, total
