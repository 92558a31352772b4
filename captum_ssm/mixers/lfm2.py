"""Gated short convolution: transformers' lfm2, lfm2_moe and lfm3.

    B, C, x = W (mask h)          y = C (conv(B x) + b)          output = W_o y

Frozen: the mask and the gates B and C.  Only the convolution mixes tokens.  In transformers 4 the
models pass a mask of token pairs, which the mixer ignores, so it treats padded tokens like real
tokens.
"""

from __future__ import annotations

from typing import Any

from .base import Call, LinearMixer
from .parts.common import hf_input_and_mask, refuse_packed, run
from .path import Path


def short_conv(module: Any, call: Call) -> LinearMixer:
    """Linearize Lfm2ShortConv, Lfm2MoeShortConv or Lfm3ShortConv."""
    refuse_packed(call)
    hidden, mask = hf_input_and_mask(module, call, cache="past_key_values")
    gate_before, gate_after, x = run(module.in_proj, hidden).chunk(3, -1)
    path = Path(x, mask).scale(gate_before, "gate").conv(module.conv)
    return path.scale(gate_after, "gate").to(module.out_proj)
