"""Errors of decompositions (LATIM, figure 4 and table 4).

:meth:`LatimNorm.decomposition_error <captum_ssm.LatimNorm.decomposition_error>` measures the mixers
of a model; these functions take any parts.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from .checks import as_scores, masked_scores


def decomposition_error(outputs: Tensor, decomposed: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the error of an output y's parts over tokens and features, (B,).

    ::

        mean |y - sum of its parts| / mean |y|

    Args:
        outputs: y, (B, L, E).
        decomposed: the sum of the parts, constants included, (B, L, E).
        mask: real tokens, (B, L). Default: None, all.

    Returns:
        (B,); NaN if the output is all zeros.

    Raises:
        InputError: when the shapes differ.
        NonFiniteError: when a real token holds NaN or infinity.

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
            f"outputs has shape {tuple(whole.shape)}, decomposed {tuple(parts.shape)}: they must "
            "be the same."
        )
    whole, parts = whole.double(), parts.double().to(whole.device)
    missed, size = (x.abs().sum((1, 2)) for x in (whole - parts, whole))
    return missed / size.where(size > 0, float("nan"))


def completeness_error(relevance: Tensor, explained: Tensor) -> Tensor:
    """Return the relative error of the sum of relevance, (B,).

    ::

        |explained - sum of relevance| / |explained|

    Args:
        relevance: (B, ...).
        explained: the number that relevance should sum to, (B,): the output, less the constants if
            a method reports them.

    Returns:
        (B,); NaN if there is nothing to explain.

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
        raise InputError(f"relevance has {len(scores)} examples, explained {len(target)} numbers.")
    return (target - scores.flatten(1).sum(1)).abs() / target.abs().where(target != 0, float("nan"))
