"""LightNet: fla's LightNetAttention.

    z[t] = log of the sum of exp(k) over tokens up to t, per key channel
    key[t] = sigmoid(k[t] - z[t-1])                       decay[t] = 1 - key[t]
    alpha_h[i, j] = SiLU(q_h[i]) . (product of decays j+1..i) key_h[j] / sqrt(N),   j <= i
    y = SiLU(g) RMSNorm(alpha v)                          output = o_proj(y)

so that each key channel reads a mean of values, weighted by exp(k).  q, k and v each pass
a short convolution if the layer has them; the norm is over all channels.  Frozen: q, the keys, z,
the decays, the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, projection, run, zeroed
from .common import entering_unpadded, projected, value_path

#: The norm runs as a function that does not get the module's eps.
_EPS = 1e-6
#: In place of k at padded tokens and of the first z: its exponential is 0 beside any other.
_NOTHING = -1e4


def fla_lightnet(module: Any, call: Call) -> LinearMixer:
    """fla's LightNetAttention."""
    hidden, mask = entering_unpadded(module, call)
    q, k = (as_heads(projected(module, name, hidden), module.num_heads) for name in "qk")
    key, log_decay = _weighted(k, mask)
    scan = VectorDecayHeads(F.silu(q) * module.head_f_dim**-0.5, key, log_decay, module.head_i_dim)
    path = value_path(module, hidden, mask, module.head_i_dim).scan(scan)
    path.rms_norm(module.g_norm.weight, _EPS, groups=1).gate(run(module.g_proj, hidden))
    # the layer reads o_proj by its weight, so an adapter around it would change nothing
    return path.silence().to(projection(module.o_proj, called=False))


def _weighted(k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys, and logarithms of decays, both (B, L, H, N)."""
    if mask is not None:
        k = k.masked_fill(~mask[:, :, None, None], _NOTHING)
    before = F.pad(torch.logcumsumexp(k.detach(), 1)[:, :-1], (0, 0, 0, 0, 1, 0), value=_NOTHING)
    real = torch.ones_like(k[:, :, 0, 0], dtype=torch.long) if mask is None else mask.long()
    more = k - before
    # before the first token there is no state that could fade
    return zeroed(torch.sigmoid(more), mask), zeroed(F.logsigmoid(-more), real.cumsum(1) > 1)
