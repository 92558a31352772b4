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
    scores, true, false = _checked(scores, gold, mask)
    others = scores.masked_fill(~false, float("inf")).sort(-1).values
    below = torch.searchsorted(others, scores)
    up_to = torch.searchsorted(others, scores, right=True)
    wins = (below + up_to).double() / 2
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
    scores, true, false = _checked(scores, gold, mask)
    found = _at_least(scores, true).double() / _at_least(scores, true | false)
    return found.where(true, 0).sum(-1) / true.sum(-1)


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
    hits, _, total = _hits(scores, gold, k, mask)
    return hits / total


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
    hits, looked_at, _ = _hits(scores, gold, k, mask)
    return hits / looked_at


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
    return _correlation(*_paired(scores, others, mask))


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
    first, second, counts = _paired(scores, others, mask)
    return _correlation(_ranks(first, counts), _ranks(second, counts), counts)


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
    first, second, counts = _paired(scores, others, mask)
    pairs = counts[:, :, None] & counts[:, None]
    one, other = ((x[:, :, None] - x[:, None]).sign() * pairs for x in (first, second))  # (B, N, N)
    agreed = (one * other).sum((1, 2))
    return agreed / (one.abs().sum((1, 2)) * other.abs().sum((1, 2))).sqrt()


def _checked(scores: Tensor, gold: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (B, N), a mask of the true units, and a mask of the false units."""
    scores, counts = masked_scores(scores, mask, "scores", dims=2)
    true = as_flags(gold, scores, "gold")
    return scores.contiguous(), true & counts, ~true & counts


def _paired(scores: Tensor, others: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return both scores in float64, and the mask of the units to use, each (B, N)."""
    first, counts = masked_scores(scores, mask, "scores", dims=2)
    second, _ = masked_scores(others, mask, "others", dims=2)
    if first.shape != second.shape:
        raise InputError(
            f"scores has shape {tuple(first.shape)}, but others has {tuple(second.shape)}. Pass "
            "two scores of the same units."
        )
    return first.double(), second.to(first.device).double(), counts


def _correlation(first: Tensor, second: Tensor, counts: Tensor) -> Tensor:
    """Return Pearson's correlation over the units where ``counts`` is True, (B,)."""
    one, other = (_centered(x, counts) for x in (first, second))
    return (one * other).sum(-1) / (one.square().sum(-1) * other.square().sum(-1)).sqrt()


def _centered(scores: Tensor, counts: Tensor) -> Tensor:
    """Return scores minus their mean over the units where ``counts`` is True; 0 elsewhere."""
    # first subtract the minimum, so that equal scores become exactly 0 without rounding error
    scores = scores - scores.masked_fill(~counts, float("inf")).amin(-1, keepdim=True)
    scores = scores.where(counts, 0)
    return (scores - scores.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True)).where(counts, 0)


def _ranks(scores: Tensor, counts: Tensor) -> Tensor:
    """Return 2 * rank - 1 of each unit, (B, N): an integer even if ties share a mean rank."""
    rising = scores.masked_fill(~counts, float("inf")).sort(-1).values
    below = torch.searchsorted(rising, scores.contiguous())
    up_to = torch.searchsorted(rising, scores.contiguous(), right=True)
    return (below + up_to).double()


def _at_least(scores: Tensor, among: Tensor) -> Tensor:
    """Return for each unit the number of units in ``among`` with an equal or higher score."""
    rising = scores.masked_fill(~among, float("-inf")).sort(-1).values
    return scores.shape[-1] - torch.searchsorted(rising, scores)


def _hits(
    scores: Tensor, gold: Tensor, k: int | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts per example: expected true units in the top K, K, and all true units."""
    if k is not None:
        check_positive(k, "k")
    scores, true, false = _checked(scores, gold, mask)
    counts = true | false
    total = true.sum(-1)
    looked_at = (total if k is None else torch.full_like(total, k)).minimum(counts.sum(-1))
    falling = scores.masked_fill(~counts, float("-inf")).sort(-1, descending=True).values
    last = falling.gather(-1, (looked_at - 1).clamp_min(0)[:, None])
    above, tied = counts & (scores > last), counts & (scores == last)
    room = (looked_at - above.sum(-1)).double()
    share = room / tied.sum(-1).clamp_min(1)
    hits = (above & true).sum(-1) + share * (tied & true).sum(-1)
    return hits.where(looked_at > 0, 0), looked_at, total
