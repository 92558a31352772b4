"""Gated short convolution: transformers' lfm2.

    B, C, x = W (mask h)          y = C (conv(B x) + b)          output = W_o y

Frozen: the mask and the gates B and C.  The convolution is all of the token mixing.
"""

from __future__ import annotations

from typing import Any

from ..operators import Chain, Diagonal, Shape
from .base import Call, LinearMixer
from .common import (
    as_heads,
    causal_conv,
    masked,
    padding_mask,
    refuse_packed,
    run,
    working_dtype,
)


def short_conv(module: Any, call: Call) -> LinearMixer:
    """transformers' Lfm2ShortConv."""
    call.refuse_cache("past_key_values", position=1)
    refuse_packed(call)
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    mask = padding_mask(call.argument("attention_mask", 2), hidden)
    if mask is not None:
        hidden = hidden * mask[:, :, None]
    write, read, values = (as_heads(x) for x in run(module.in_proj, hidden).chunk(3, -1))
    shape = Shape(*values.shape)  # (B, L, E, 1)
    conv, _ = causal_conv(module.conv, write * values, mask, shape)
    operator = Chain(
        Diagonal(read, shape, "gate"),
        conv,
        *masked(mask, shape, values),
        Diagonal(write, shape, "gate"),
    )
    return LinearMixer(values, operator, lambda y: run(module.out_proj, y.flatten(2)), mask)
