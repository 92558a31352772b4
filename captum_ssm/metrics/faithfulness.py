"""Compare token-to-token maps with the true sources of each token (LATIM, section 4.1).

For the copying task, the mask selects the submatrix of copied tokens and their source tokens. The
true pairs are the three main diagonals of this submatrix (LATIM, table 2).

Shapes: B examples, T target tokens, S source tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import as_flags, masked_scores
from .ranking import average_precision, recall_at_k, roc_auc


class Faithfulness(NamedTuple):
    """The measures of LATIM's table 2, for each example (B,).

    Attributes:
        auc: area under the ROC curve.
        ap: average precision.
        recall: recall at K.
    """

    auc: Tensor
    ap: Tensor
    recall: Tensor


def token_faithfulness(
    maps: Tensor,
    gold: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    per_row: bool = False,
) -> Faithfulness:
    """Measure how high maps rank the true pairs of tokens.

    Args:
        maps: relevance of sources for targets, (B, T, S).
        gold: the true pairs, (B, T, S), as booleans or 0 and 1.
        mask: True for the pairs to rank, (B, T, S). Default: None, all.
        k: the K for recall at K. Default: None, the number of true pairs in the matrix or row.
        per_row: rank the sources of each target separately, and average over the targets that have
            both true and false sources. Default: False, rank all pairs of a matrix together.

    Returns:
        :class:`Faithfulness` with tensors (B,); NaN if undefined, see
        :mod:`~captum_ssm.metrics.ranking`.

    Raises:
        InputError: when the shapes differ, or gold has an entry other than 0 and 1.
        OptionError: when k is below 1.
        NonFiniteError: when maps contains NaN or infinity where mask is True.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import token_faithfulness
        >>> maps = torch.tensor([[[0.9, 0.1], [0.6, 0.4]]])
        >>> found = token_faithfulness(maps, gold=torch.eye(2)[None])
        >>> [round(value.item(), 2) for value in found]  # auc, ap, recall
        [0.75, 0.83, 0.5]
    """
    scores, ranked = masked_scores(maps, mask, "maps", dims=3)
    true = as_flags(gold, scores, "gold")
    rows = [x.flatten(0, 1) if per_row else x.flatten(1) for x in (scores, true, ranked)]
    measures = (roc_auc(*rows), average_precision(*rows), recall_at_k(rows[0], rows[1], k, rows[2]))
    if not per_row:
        return Faithfulness(*measures)
    by_row = torch.stack(measures, -1)
    # a row without true or without false sources counts in none of the three means
    by_row = by_row.masked_fill(by_row.isnan().any(-1, keepdim=True), float("nan"))
    return Faithfulness(*by_row.view(len(maps), -1, 3).nanmean(1).unbind(-1))


def relevance_mass(relevance: Tensor, gold: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the share of the positive relevance that belongs to true units.

    Args:
        relevance: the relevance of each unit, (B, ...).
        gold: True for true units, in the same shape.
        mask: True for units to use, in the same shape. Default: None, all.

    Returns:
        Shares (B,); NaN if no unit has positive relevance.

    Raises:
        InputError: when the shapes differ, or gold has an entry other than 0 and 1.
        NonFiniteError: when relevance contains NaN or infinity where mask is True.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import relevance_mass
        >>> relevance_mass(torch.tensor([[3.0, -1.0, 1.0]]), torch.tensor([[1, 0, 0]])).tolist()
        [0.75]
    """
    scores, _ = masked_scores(relevance, mask, "relevance")
    positive = scores.clamp_min(0).double().flatten(1)
    true = as_flags(gold, scores, "gold").flatten(1)
    return (positive * true).sum(1) / positive.sum(1)
