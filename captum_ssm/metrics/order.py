"""The order in which relevance has units changed, and how many have been at each share.

Shapes: B examples, N units (pixels, tokens) of each, F shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import as_mask, masked_scores


def change_order(
    relevance: Tensor,
    *,
    most_first: bool,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """When each unit is changed, 0 being first, (B, N).

    Args:
        relevance: (B, N).
        most_first: the most relevant units first, or the least relevant.
        mask: units that may be changed, (B, N); the others come last. Default: None, all.
        generator: breaks ties at random, on the CPU; constant relevance is then a random order.
            Default: None, the unit further left comes first.

    Returns:
        (B, N) of integers, each of 0 to N - 1 once in a row.

    Raises:
        InputError: when relevance is not (B, N), or mask is not of its shape.
        NonFiniteError: when a unit that may be changed has relevance NaN or infinity.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import change_order
        >>> change_order(torch.tensor([[0.1, 0.9, 0.5]]), most_first=True).tolist()
        [[2, 0, 1]]
    """
    scores, allowed = masked_scores(relevance, mask, "relevance", dims=2)
    key = (-scores if most_first else scores).masked_fill(~allowed, float("inf"))
    if generator is None:
        order = key.argsort(dim=-1, stable=True)
    else:
        shuffled = torch.rand(key.shape, generator=generator).argsort(-1).to(key.device)
        order = shuffled.gather(-1, key.gather(-1, shuffled).argsort(dim=-1, stable=True))
    places = torch.arange(key.shape[-1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def changed(order: Tensor, fractions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Which units are changed at each share, (B, F, N).

    Of n units that may be changed, the share f changes the first floor(f n).

    Args:
        order: of :func:`change_order` with the same mask, (B, N).
        fractions: (F,).
        mask: units that may be changed, (B, N). Default: None, all.
    """
    units = as_mask(mask, order).sum(-1)
    # 0.7 * 10 is a little below 7 in some binary arithmetic
    counts = (fractions.to(units.device) * units[:, None] + 1e-9).floor()  # (B, F)
    return order[:, None] < counts[..., None]
