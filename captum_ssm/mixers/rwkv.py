"""RWKV-4: transformers' rwkv.

    k, v, r = maps of h mixed with the previous token's h (the token shift)
    y = sigmoid(r) alpha v          output = W_o y

where alpha[i, j] is the softmax over j of (i - 1 - j) w + k[j] for j < i and u + k[i] for j = i,
with w = -exp(time_decay) and u = time_first.  Frozen: k and the gate.

The values are the v that enter alpha, so a token's value holds a part of the token before it.  The
unified paper leaves the shift over the values out as well.  The shift acts on the channels of h and
the value projection then mixes them: no convolution per value channel equals it.

In evaluation the model halves its stream every few blocks and scales the output projections of
later blocks to fit, in place at its first run.  h is normalized, so this changes W_o alone.  The
model gets no mask of padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operators import WKV
from .base import Call, LinearMixer
from .parts.common import entering, run
from .path import Path


def rwkv4(module: Any, call: Call) -> LinearMixer:
    """transformers' RwkvSelfAttention."""
    call.refuse_cache("state", position=1)
    hidden = entering(module, call, "hidden")
    before = torch.nn.functional.pad(hidden, (0, 0, 1, -1))

    def shifted(mix: Tensor) -> Tensor:
        mix = mix.to(hidden)
        mixture: Tensor = hidden * mix + before * (1 - mix)
        return mixture

    key = run(module.key, shifted(module.time_mix_key))
    values = run(module.value, shifted(module.time_mix_value))
    gate = run(module.receptance, shifted(module.time_mix_receptance))
    scan = WKV(key, -torch.exp(module.time_decay.to(key)), module.time_first.to(key))
    return Path(values).scan(scan).gate(gate, torch.sigmoid).to(module.output)
