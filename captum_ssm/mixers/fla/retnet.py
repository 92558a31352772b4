"""RetNet: fla's MultiScaleRetention.

    q, k = rotate(q), rotate(k)                        gamma[h] = 1 - 2^(-5 - h)
    alpha_h[i, j] = gamma[h]^(i - j) q_h[i] . k_h[j] / sqrt(N),   j <= i
    y = SiLU(g) RMSNorm_h(alpha v)                     output = o_proj(y)

Queries, keys and values each pass a short convolution with SiLU if the layer has them, and
groups of heads share keys and values if num_kv_heads is smaller than num_heads.  Frozen: q and k,
the convolution's SiLU(u) / u, the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch

from ...operators import ScalarDecayHeads
from ..base import Call, LinearMixer
from .common import closing, entering_unpadded, norm_and_gate, queries_and_keys, rotated, zeroed


def fla_retention(module: Any, call: Call) -> LinearMixer:
    """fla's MultiScaleRetention."""
    hidden, mask = entering_unpadded(module, call)
    groups = module.num_kv_groups
    q, k = queries_and_keys(module, hidden)
    q, k = rotated(module.rotary, mask, q), rotated(module.rotary, mask, k)

    head = torch.arange(module.num_heads, dtype=q.dtype, device=q.device)
    log_decay = torch.log1p(-(2.0 ** (-5 - head))).expand(*q.shape[:3])
    scan = ScalarDecayHeads(
        q * module.head_k_dim**-0.5,
        k.repeat_interleave(groups, 2),
        zeroed(log_decay, mask),
        None,
        module.head_v_dim,
    )
    return closing(module, hidden, mask, scan, norm_and_gate, repeat=groups)
