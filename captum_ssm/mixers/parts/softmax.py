"""Softmax attention as an operator, computed from queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ...operators import Chain, DenseHeads, Operator, Shape, ShortConv
from ...operators.heads import SoftmaxHeads
from ...operators.kernels.truths import read_once

#: A mask term of at most this value makes a score's exponential underflow, which hides the key.
_HIDDEN = -6e4


def softmax_attention(
    query: Tensor, key: Tensor, values: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Operator, Tensor | None]:
    """Return the operator softmax(scaling q k^T + mask), and the mask of real tokens.

    A query for which all keys are hidden is padding and gets a row of zeros.  The model's output
    there (with large negative mask terms, the mean of all tokens) becomes a constant term.

    Args:
        query: queries (B, H, L, N).
        key: keys (B, H, L, N).
        values: values (B, L, H, P).
        scaling: factor of the scores.
        mask: mask broadcastable to (B, H, L, L): boolean, True for visible pairs of query and key,
            or terms to add to the scores; None if all pairs are visible.

    Returns:
        The operator, and a boolean (B, L), True for tokens visible to any query; None if all are.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import softmax_attention
        >>> query = key = torch.zeros(1, 1, 2, 4)  # all scores are equal
        >>> causal = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
        >>> operator, _ = softmax_attention(query, key, torch.ones(1, 2, 1, 4), 0.5, causal)
        >>> operator.dense().tolist()
        [[[1.0, 0.0], [0.5, 0.5]]]
    """
    shape = Shape(*values.shape)
    hidden = None if mask is None else _is_hidden(mask)

    def softmax(query: Tensor, key: Tensor) -> Tensor:
        """Return the probabilities as the model computes them."""
        # in place, because allocating a tensor of this size takes longer than filling it
        scores = (query @ key.mT).mul_(scaling)
        if mask is None:
            return scores.softmax(-1)
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores.add_(mask.to(scores))
        return scores.softmax(-1).nan_to_num_(0)  # NaN: a row of nothing but -inf

    def probabilities(query: Tensor, key: Tensor) -> Tensor:
        """Return the operator's matrices: probabilities, but zero for hidden pairs."""
        matrices = softmax(query, key)
        return matrices if hidden is None else matrices.masked_fill_(hidden, 0)

    def operator_of(matrices: Tensor) -> DenseHeads:
        """Return the operator, with queries and keys if they have a graph."""
        if not (query.requires_grad or key.requires_grad):
            return DenseHeads(matrices, shape.per_head)
        vectors = query.transpose(1, 2), key.transpose(1, 2)
        return SoftmaxHeads(*vectors, probabilities, scaling, shape.per_head, matrices)

    matrices = softmax(query, key)
    if hidden is None:
        return operator_of(matrices), None
    blind = hidden.all(-1, keepdim=True)  # queries whose keys are all hidden
    visible = (~hidden).any(-2).any(1).expand(shape.batch, -1)
    any_blind, all_visible = read_once("pairs", lambda: _bools(blind.any(), visible.all()), of=mask)
    blind_rows = matrices.masked_fill(~blind, 0) if any_blind else None  # before `matrices` change
    core: Operator = operator_of(matrices.masked_fill_(hidden, 0))
    if blind_rows is not None:
        constant = DenseHeads(blind_rows, shape.per_head).apply(values)
        # the identity as a convolution, which has a place for the constant
        one_tap = values.new_ones(shape.heads, shape.per_head, 1)
        core = Chain(ShortConv(one_tap, shape, constant, component=None), core)
    return core, None if all_visible else visible


def seen_pairs(
    tokens: int, device: torch.device, *, causal: bool = True, window: int | None = None
) -> Tensor | None:
    """Return a mask of the pairs of query and key that are visible, with causality and a window.

    All mixers of a call on a device share one tensor.  Every token is visible to itself, so the
    tensor's properties need not be read from a GPU.

    Args:
        tokens: number of tokens, L.
        device: device of the result.
        causal: whether later keys are hidden. Default: True.
        window: only keys at a smaller distance than this are visible. Default: None, no window.

    Returns:
        A boolean (1, 1, L, L), or None if every pair is visible.
    """
    if (not causal or tokens == 1) and (window is None or window >= tokens):
        return None

    def make() -> Tensor:  # (1, 1, L, L)
        pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        pairs = pairs.tril() if causal else pairs
        pairs = pairs if window is None else pairs.tril(window - 1).triu(1 - window)
        return pairs[None, None]

    pairs = read_once(("seen", tokens, device, causal, window), make)
    # for softmax_attention: no query has only hidden keys, and every token is visible
    read_once("pairs", lambda: [False, True], of=pairs)
    return pairs


def _is_hidden(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= _HIDDEN


def read_pairs(mask: Tensor, about: Hashable, truth: Callable[[], Tensor]) -> None:
    """Read a mask's properties and one more check from a GPU together, and cache both.

    Args:
        mask: mask of :func:`softmax_attention`.
        about: key under which :func:`read_once` finds the check.
        truth: function that returns the check, a boolean tensor.
    """

    def read() -> list[bool]:  # [some query sees no key, all tokens are visible]
        hidden = _is_hidden(mask)
        *facts, check = _bools(hidden.all(-1).any(), (~hidden).any(-2).any(1).all(), truth())
        read_once(about, lambda: check)  # stores it under this key
        return facts

    read_once("pairs", read, of=mask)


def _bools(*truths: Tensor) -> list[bool]:
    """Return tensors of one boolean each as Python booleans, waiting for the device once."""
    values: list[bool] = torch.stack(truths).tolist()
    return values
