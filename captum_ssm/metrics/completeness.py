"""Measure the errors of decompositions (LATIM, figure 4 and table 4).

:meth:`LatimNorm.decomposition_error <captum_ssm.LatimNorm.decomposition_error>` computes the errors
of a model's mixers. The functions here take tensors of any decomposition.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from .checks import as_scores, masked_scores


def decomposition_error(outputs: Tensor, decomposed: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the relative error of a decomposition of an output y.

    ::

        mean |y - sum of the parts of y| / mean |y|

    Args:
        outputs: the decomposed output y, (B, L, E).
        decomposed: the sum of all parts, including constants, (B, L, E).
        mask: True for tokens that are not padding, (B, L). Default: None, all.

    Returns:
        Errors (B,), which are means over tokens and features; NaN if the output is 0.

    Raises:
        InputError: when the shapes differ.
        NonFiniteError: when an unpadded token contains NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import decomposition_error
        >>> y = torch.tensor([[[1.0, -1.0], [2.0, 0.0]]])
        >>> decomposition_error(y, torch.tensor([[[1.0, -1.0], [1.0, 0.0]]])).tolist()
        [0.25]
    """
    whole, _ = masked_scores(outputs, mask, "outputs", dims=3, features=True)
    parts, _ = masked_scores(decomposed, mask, "decomposed", dims=3, features=True)
    if whole.shape != parts.shape:
        raise InputError(
            f"outputs has shape {tuple(whole.shape)}, but decomposed has {tuple(parts.shape)}. "
            "Pass tensors of the same shape."
        )
    whole, parts = whole.double(), parts.double().to(whole.device)
    missed, size = (x.abs().sum((1, 2)) for x in (whole - parts, whole))
    return missed / size.where(size > 0, float("nan"))


def completeness_error(relevance: Tensor, explained: Tensor) -> Tensor:
    """Return the relative difference between the sum of relevance and the explained number.

    ::

        |explained - sum of relevance| / |explained|

    Args:
        relevance: relevance of any shape, (B, ...).
        explained: the number that relevance should sum to, (B,): the output, minus the constants if
            a method reports them.

    Returns:
        Errors (B,); NaN if ``explained`` is 0.

    Raises:
        InputError: when ``explained`` does not have one number per example.
        NonFiniteError: when a number is NaN or infinite.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import completeness_error
        >>> completeness_error(torch.tensor([[0.5, 0.25]]), torch.tensor([1.0])).tolist()
        [0.25]
    """
    scores = as_scores(relevance, "relevance").double()
    target = as_scores(explained, "explained", dims=1).double().to(scores.device)
    if len(scores) != len(target):
        raise InputError(
            f"relevance has {len(scores)} examples, but explained has {len(target)} numbers. Pass "
            "one number per example."
        )
    return (target - scores.flatten(1).sum(1)).abs() / target.abs().where(target != 0, float("nan"))
