"""Torch's own module of softmax attention.

    q, k, v = in_proj(x)      alpha = softmax(q k^T / sqrt(N) + mask)      y = out_proj(alpha v)

The operator is recomputed from the arguments, whether or not the module runs its fast path or
returns its weights.  Frozen: the probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedMixerError
from .base import Call, LinearMixer
from .parts.common import linear, run, working_dtype
from .parts.softmax import softmax_attention


def torch_attention(module: Any, call: Call) -> LinearMixer:
    """nn.MultiheadAttention, of a sequence that reads itself."""
    _refuse(module, [call.argument(name, i) for i, name in enumerate(("query", "key", "value"))])
    hidden = call.hidden_states.to(working_dtype(module, call.hidden_states))
    batch, tokens, _ = hidden.shape
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    bias = module.in_proj_bias
    biases = (None, None, None) if bias is None else bias.chunk(3)
    query, key, values = (
        linear(hidden, w, b).view(batch, tokens, module.num_heads, -1)
        for w, b in zip(weights, biases, strict=True)
    )
    operator, read = softmax_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        values,
        module.head_dim**-0.5,
        _mask(module, call, hidden),
    )
    return LinearMixer(values, operator, lambda y: run(module.out_proj, y.flatten(2)), read)


def _refuse(module: Any, inputs: list[Tensor]) -> None:
    """Raise unless a sequence reads itself, with examples in the first dimension."""
    query, *others = inputs
    name = type(module).__name__
    if any(x is not query and not _same(x, query) for x in others):
        raise UnsupportedMixerError(
            f"{name} is called on queries that are not its keys and values: only self-attention is "
            "supported."
        )
    if query.dim() == 3 and not module.batch_first:
        raise UnsupportedMixerError(
            f"{name} with batch_first=False is not supported: make it, or the layer around it, "
            "with batch_first=True and give it its examples in front."
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedMixerError(
            f"{name} with add_bias_kv or add_zero_attn: a key that is no token is not supported."
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _mask(module: Any, call: Call, hidden: Tensor) -> Tensor | None:
    """The term added to the scores, broadcastable to (B, H, L, L); None if everything is read."""
    batch, tokens, _ = hidden.shape
    pairs, padding = call.argument("attn_mask", 5), call.argument("key_padding_mask", 3)
    added = []
    if pairs is not None:
        size = (tokens, tokens) if pairs.dim() == 2 else (-1, module.num_heads, tokens, tokens)
        added.append(_added(pairs, hidden).view(size))
    if padding is not None:
        added.append(_added(padding, hidden).view(batch, 1, 1, tokens))
    if not added:
        return None
    total = sum(added[1:], added[0])
    return total[(None,) * (4 - total.dim())]


def _added(mask: Tensor, hidden: Tensor) -> Tensor:
    """Convert a mask, boolean with True for hidden tokens, to a term added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(hidden)
    return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(mask, -torch.inf)
