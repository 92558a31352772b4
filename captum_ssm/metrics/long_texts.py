"""Measure the relevance of passages in long texts (LATIM, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from .checks import as_scores


def span_relevance(relevance: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the mean relevance (B, n) of the tokens in each of n ranges (LATIM, figure 3).

    Args:
        relevance: the relevance of each token, (B, L).
        spans: n ranges (start, stop) of tokens; ``stop`` is not included.

    Raises:
        InputError: when there is no range, or a range is empty or outside of the text.
        NonFiniteError: when relevance contains NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import span_relevance
        >>> span_relevance(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [(0, 2), (3, 4)]).tolist()
        [[1.5, 4.0]]
    """
    scores = as_scores(relevance, "relevance", dims=2).double()
    tokens = scores.shape[1]
    for start, stop in spans:
        if not 0 <= start < stop <= tokens:
            raise InputError(
                f"spans has ({start}, {stop}). Pass ranges of at least one token, with "
                f"0 <= start < stop <= {tokens}."
            )
    if not spans:
        raise InputError("spans is empty. Pass at least one range of tokens.")
    return torch.stack([scores[:, start:stop].mean(1) for start, stop in spans], 1)
