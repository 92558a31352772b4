"""Measure answers from long texts, and the relevance of passages (LATIM, section 4.3).

Answers are scored as in RULER (Hsieh et al. 2024): a reference answer is found if it occurs
anywhere in the model's text, in upper or lower case.
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
    """Return the share of reference answers that occur in each prediction.

    Args:
        predictions: the text that the model generated for each example.
        answers: one or more reference answers for each example.
        mode: ``"all"``, the share of references that occur, which RULER uses for needles, keys and
            frequent words; or ``"any"``, 1 if at least one reference occurs, which RULER uses for
            questions. Default: ``"all"``.

    Returns:
        Scores (n,), float64, from 0 to 1.

    Raises:
        InputError: when predictions and answers differ in number, or an example has no answers.
        OptionError: when mode is unknown.

    Example:
        >>> from captum_ssm.metrics import answers_found
        >>> answers_found(["It is 41 or ABC."], [["41", "abc", "42", "7"]]).tolist()
        [0.5]
        >>> answers_found(["It is 41 or 43."], [["41", "42"]], mode="any").tolist()
        [1.0]
    """
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}: pass one of {MODES}.")
    if len(predictions) != len(answers):
        raise InputError(
            f"predictions has {len(predictions)} entries, but answers has {len(answers)}. Pass a "
            "list of answers for each prediction."
        )
    for wanted in answers:
        if isinstance(wanted, str) or not len(wanted):
            raise InputError(f"answers has {wanted!r}. Pass a list of references per example.")
    found = []
    for said, wanted in zip(predictions, answers, strict=True):
        hits = [float(reference.lower() in said.lower()) for reference in wanted]
        found.append(sum(hits) / len(hits) if mode == "all" else max(hits))
    return torch.tensor(found, dtype=torch.float64)


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
