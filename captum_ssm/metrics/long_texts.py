"""Retrieval from long texts: correct answers, and relevance of the evidence (LATIM, 4.3).

Answers are scored as in RULER (Hsieh et al. 2024): a reference is found if it occurs anywhere in
the model's text, regardless of case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .checks import as_scores

MODES = ("all", "any")


def answers_found(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], mode: str = "all"
) -> Tensor:
    """Return the share of references in each prediction, (n,).

    Args:
        predictions: the model's texts, one per example.
        answers: the references of each example, one or more.
        mode: ``"all"``, the share of references that occur, RULER's score for needles, keys and
            frequent words. ``"any"``, 1 if a reference occurs, RULER's score for questions.
            Default: ``"all"``.

    Returns:
        (n,), float64, from 0 to 1.

    Raises:
        InputError: when there are not as many predictions as examples, or an example has no list
            of references.
        OptionError: when mode is unknown.

    Example:
        >>> from captum_ssm.metrics import answers_found
        >>> answers_found(["It is 41 or ABC."], [["41", "abc", "42", "7"]]).tolist()
        [0.5]
        >>> answers_found(["It is 41 or 43."], [["41", "42"]], mode="any").tolist()
        [1.0]
    """
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}: use one of {MODES}.")
    if len(predictions) != len(answers):
        raise InputError(f"There are {len(predictions)} predictions for {len(answers)} examples.")
    if any(isinstance(wanted, str) or not len(wanted) for wanted in answers):
        raise InputError("answers must hold a list of one or more references for each example.")
    found = []
    for said, wanted in zip(predictions, answers, strict=True):
        hits = [float(reference.lower() in said.lower()) for reference in wanted]
        found.append(sum(hits) / len(hits) if mode == "all" else max(hits))
    return torch.tensor(found, dtype=torch.float64)


def span_relevance(relevance: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the mean relevance of ranges of tokens (LATIM, figure 3), (B, n).

    Args:
        relevance: (B, L).
        spans: n ranges of tokens, the first and one past the last.

    Returns:
        (B, n), float64.

    Raises:
        InputError: when there is no range, or one is empty or leaves the text.
        NonFiniteError: when relevance holds NaN or infinity.

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
                f"spans holds ({start}, {stop}), which is not a range of one or more of the "
                f"{tokens} tokens."
            )
    if not spans:
        raise InputError("spans is empty: name at least one range of tokens.")
    return torch.stack([scores[:, start:stop].mean(1) for start, stop in spans], 1)
