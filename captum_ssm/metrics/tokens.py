"""Replace tokens of a sequence of ids or embeddings.

Shapes: R texts, L tokens, E features of an embedding.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, OptionError

#: A token's replacement: an id, or for embeddings a number or a vector (E,).
Filling = int | float | Tensor


def is_sequence(inputs: Tensor) -> bool:
    """Return True for nonempty token ids (R, L) or floating-point embeddings (R, L, E)."""
    return inputs.dim() == (3 if inputs.is_floating_point() else 2) and inputs.numel() > 0


def fill_for(fill: Filling, inputs: Tensor) -> Tensor:
    """Return the fill as a tensor in the dtype of ids (R, L) or embeddings (R, L, E)."""
    if not inputs.is_floating_point():
        _check_id(fill)
    value = torch.as_tensor(fill, dtype=inputs.dtype, device=inputs.device)
    if value.dim() > 1 or (value.dim() == 1 and value.shape != inputs.shape[2:]):
        raise InputError(
            f"fill has shape {tuple(value.shape)} for inputs of shape {tuple(inputs.shape)}: pass "
            "an id, or for embeddings a number or a vector of their width."
        )
    return value


def replace_tokens(rows: Tensor, chosen: Tensor, fill: Filling) -> Tensor:
    """Return ids (R, L) or embeddings (R, L, E) with the fill at the chosen tokens (R, L)."""
    mask = chosen if rows.dim() == 2 else chosen[..., None]
    return torch.where(mask, fill_for(fill, rows), rows)


def draw_tokens(allowed: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return a random mask (R, L) of a share of each row's allowed tokens, at least one token."""
    check_share(share)
    random = torch.rand(allowed.shape, generator=generator).to(allowed.device)
    rank = random.masked_fill(~allowed, 2).argsort(-1).argsort(-1)  # 2: after all allowed tokens
    count = (share * allowed.sum(-1)).round().clamp_min(1)
    return (rank < count[:, None]) & allowed


def check_share(share: float) -> None:
    """Raise OptionError unless ``share`` is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise OptionError(f"share={share}: pass a number above 0 and at most 1.")


def _check_id(fill: Any) -> None:
    """Raise OptionError unless ``fill`` is an integer."""
    try:
        operator.index(fill)
    except (TypeError, ValueError):
        raise OptionError(
            f"fill={fill!r} is not a token id. Pass an integer, such as the id of <UNK>."
        ) from None
