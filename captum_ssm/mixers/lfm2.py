"""Gated short convolution: transformers' lfm2, lfm2_moe and lfm3.

    B, C, x = W (mask h)          y = C (conv(B x) + b)          output = W_o y

Frozen: the mask and the gates B and C.  The convolution is all of the token mixing.  The models of
transformers 4 hand it a mask of pairs, which it passes over: there padded tokens take part.
"""

from __future__ import annotations

from typing import Any

from ..operators import Chain, Diagonal, Shape
from .base import Call, LinearMixer
from .parts.common import as_heads, causal_conv, hf_entering, masked, refuse_packed, run


def short_conv(module: Any, call: Call) -> LinearMixer:
    """transformers' Lfm2ShortConv, Lfm2MoeShortConv and Lfm3ShortConv."""
    refuse_packed(call)
    hidden, mask = hf_entering(module, call, cache="past_key_values")
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
