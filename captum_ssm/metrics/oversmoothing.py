"""Measure oversmoothing: the similarity of a layer's tokens (HA, appendix on arXiv)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import QueryError
from .checks import masked_scores


def token_similarity(
    tokens: Tensor, mask: Tensor | None = None, *, query: int | Tensor | None = None
) -> Tensor:
    """Return the mean cosine similarity of all pairs of tokens, computed in linear time.

    If u are the tokens' vectors scaled to length 1, the mean over the L (L - 1) ordered pairs is::

        (|sum of u|^2 - sum of |u|^2) / (L (L - 1))

    Args:
        tokens: the output of a layer, (B, L, E).
        mask: True for tokens that are not padding, (B, L). Default: None, all.
        query: the position of a token to leave out, such as the class token, or one position per
            example (B,); negative positions count from the end. Default: None.

    Returns:
        Similarities (B,); NaN for fewer than two tokens. Pairs with a zero vector count as 0.

    Raises:
        InputError: when tokens is not (B, L, E), or mask is not (B, L).
        QueryError: when query is not a position of the sequence.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import token_similarity
        >>> tokens = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]])
        >>> round(token_similarity(tokens).item(), 2)  # of the pairs 1, 0 and 0
        0.33
        >>> token_similarity(tokens, query=-1).item()
        1.0
    """
    vectors, used = masked_scores(tokens, mask, "tokens", dims=3, features=True)
    if query is not None:
        used = used & ~_query_mask(query, used)
    unit = torch.nn.functional.normalize(vectors.double(), dim=-1) * used[..., None]
    pair_sum = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))
    token_count = used.sum(-1).double()
    return (pair_sum / (token_count * (token_count - 1))).where(token_count > 1, float("nan"))


def _query_mask(query: int | Tensor, like: Tensor) -> Tensor:
    """Return a mask (B, L) that is True at the query of each example."""
    batch, tokens = like.shape
    positions = torch.as_tensor(query, device=like.device)
    if positions.is_floating_point() or positions.shape not in ((), (batch,)):
        raise QueryError(f"query={query!r}: pass a position, or one for each of {batch} examples.")
    if not bool(((positions >= -tokens) & (positions < tokens)).all()):
        raise QueryError(
            f"query={query!r} is outside of the {tokens} tokens. Pass a token's position."
        )
    return torch.arange(tokens, device=like.device) == (positions % tokens).expand(batch)[:, None]
