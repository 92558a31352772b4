"""Softmax attention as an operator, given queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ...operators import Chain, DenseHeads, Operator, Shape, ShortConv
from ...operators.heads import SoftmaxHeads
from ...operators.kernels.truths import read_once

#: Added to a score, this or less makes the exponential underflow: the key is hidden.
_HIDDEN = -6e4


def softmax_attention(
    query: Tensor, key: Tensor, values: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Operator, Tensor | None]:
    """Return the operator softmax(scaling q k^T + mask), and the mask of tokens that are read.

    A token that may read nothing is padding and has a row of zeros.  The model's own output there
    (for a mask of large negative numbers the mean of all tokens) counts as bias.

    Args:
        query: (B, H, L, N).
        key: (B, H, L, N).
        values: (B, L, H, P).
        scaling: factor of the scores.
        mask: broadcastable to (B, H, L, L), boolean with True for pairs that are read, or added to
            the scores; None if all are read.

    Returns:
        The operator, and a boolean (B, L), or None if every token is read.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import softmax_attention
        >>> query = key = torch.zeros(1, 1, 2, 4)  # all scores are alike
        >>> causal = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
        >>> operator, _ = softmax_attention(query, key, torch.ones(1, 2, 1, 4), 0.5, causal)
        >>> operator.dense().tolist()
        [[[1.0, 0.0], [0.5, 0.5]]]
    """
    shape = Shape(*values.shape)
    hidden = None if mask is None else _hidden(mask)

    def computed(query: Tensor, key: Tensor) -> Tensor:
        # in place: to allocate a tensor of this size takes longer than to fill it
        scores = (query @ key.mT).mul_(scaling)
        if mask is None:
            return scores.softmax(-1)
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores.add_(mask.to(scores))
        return scores.softmax(-1).nan_to_num_(0)  # NaN: a row of nothing but -inf

    def probabilities(query: Tensor, key: Tensor) -> Tensor:
        found = computed(query, key)
        return found if hidden is None else found.masked_fill_(hidden, 0)

    def heads(matrices: Tensor) -> DenseHeads:
        if not (query.requires_grad or key.requires_grad):
            return DenseHeads(matrices, shape.per_head)
        rows = query.transpose(1, 2), key.transpose(1, 2)
        return SoftmaxHeads(*rows, probabilities, scaling, shape.per_head, matrices)

    matrices = computed(query, key)
    if hidden is None:
        return heads(matrices), None
    blind = hidden.all(-1, keepdim=True)  # rows that read nothing
    read = (~hidden).any(-2).any(1).expand(shape.batch, -1)
    are_blind, all_read = read_once("pairs", lambda: _read(blind.any(), read.all()), of=mask)
    idle = matrices.masked_fill(~blind, 0) if are_blind else None
    core: Operator = heads(matrices.masked_fill_(hidden, 0))
    if idle is not None:
        constant = DenseHeads(idle, shape.per_head).apply(values)
        one = values.new_ones(shape.heads, shape.per_head, 1)
        core = Chain(ShortConv(one, shape, constant, component=None), core)
    return core, None if all_read else read


def seen_pairs(
    tokens: int, device: torch.device, *, causal: bool = True, window: int | None = None
) -> Tensor | None:
    """Return the pairs of a query and a key that attention sees without a mask.

    All mixers of a call on a device share one tensor.  It is known without reading it that each
    token sees itself.

    Args:
        tokens: how many there are, L.
        device: of the result.
        causal: whether queries see no later keys. Default: True.
        window: queries see only keys nearer than this. Default: None, all.

    Returns:
        A boolean (1, 1, L, L), or None if every pair is seen.
    """
    if (not causal or tokens == 1) and (window is None or window >= tokens):
        return None

    def make() -> Tensor:
        pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        pairs = pairs.tril() if causal else pairs
        pairs = pairs if window is None else pairs.tril(window - 1).triu(1 - window)
        return pairs[None, None]

    pairs = read_once(("seen", tokens, device, causal, window), make)
    read_once("pairs", lambda: [False, True], of=pairs)
    return pairs


def _hidden(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= _HIDDEN


def read_pairs(mask: Tensor, about: Hashable, truth: Callable[[], Tensor]) -> None:
    """Read a mask's properties for :func:`softmax_attention` and a check, in one wait for a device.

    Args:
        mask: see :func:`softmax_attention`.
        about: key of the check; see :func:`read_once`.
        truth: makes the check.
    """

    def read() -> list[bool]:
        hidden = _hidden(mask)
        *found, other = _read(hidden.all(-1).any(), (~hidden).any(-2).any(1).all(), truth())
        read_once(about, lambda: other)
        return found

    read_once("pairs", read, of=mask)


def _read(*truths: Tensor) -> list[bool]:
    """Read several checks, by one wait for a device."""
    found: list[bool] = torch.stack(truths).tolist()
    return found
