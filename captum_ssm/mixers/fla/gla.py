"""Gated linear attention and HGRN2: fla's GatedLinearAttention and HGRN2Attention.

    alpha_h[i, j] = q_h[i] . (product of decays j+1..i) k_h[j] / sqrt(N),   j <= i

with one decay per key channel.  GLA: decay = sigmoid(g)^(1/16), y = SiLU(gate) RMSNorm_h(alpha v).
HGRN2: the forget gate f is the decay and 1 - f the key, q passes SiLU, y = RMSNorm(alpha v) over
all channels.  Both have optional short convolutions.  Frozen: q, k, the decays, the convolution's
SiLU(u) / u, the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...operators import Chain, VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, linear, masked, run
from .common import (
    closing,
    convolved,
    entering_unpadded,
    frozen_rms_norm,
    norm_and_gate,
    queries_and_keys,
    value_stream,
    zeroed,
)
from .hgrn import log_forget

#: HGRN2's norm runs as a function that does not get the module's eps.
_HGRN2_EPS = 1e-5


def fla_gla(module: Any, call: Call) -> LinearMixer:
    """fla's GatedLinearAttention."""
    hidden, mask = entering_unpadded(module, call)
    groups = module.num_kv_groups
    q, k = queries_and_keys(module, hidden)
    log_decay = F.logsigmoid(run(module.gk_proj, hidden)) / module.gate_logit_normalizer
    if module.clamp_min is not None:
        log_decay = torch.clamp_min(log_decay, module.clamp_min)
    log_decay = as_heads(log_decay, module.num_kv_heads)

    scan = VectorDecayHeads(
        q * module.head_k_dim**-0.5,
        k.repeat_interleave(groups, 2),
        zeroed(log_decay.repeat_interleave(groups, 2), mask),
        module.head_v_dim,
    )
    return closing(module, hidden, mask, scan, norm_and_gate, repeat=groups)


def fla_hgrn2(module: Any, call: Call) -> LinearMixer:
    """fla's HGRN2Attention."""
    hidden, mask = entering_unpadded(module, call)
    q = F.silu(convolved(getattr(module, "q_conv1d", None), run(module.q_proj, hidden)))
    f = convolved(getattr(module, "f_conv1d", None), run(module.f_proj, hidden))
    log_decay = log_forget(module, f, call)
    q, k, log_decay = (as_heads(x, module.num_heads) for x in (q, 1 - log_decay.exp(), log_decay))
    scan = VectorDecayHeads(
        q * module.head_f_dim**-0.5, k, zeroed(log_decay, mask), module.head_i_dim
    )
    conv = getattr(module, "i_conv1d", None)
    values, inner = value_stream(run(module.i_proj, hidden), conv, mask, module.head_i_dim)
    core = Chain(scan, *inner)
    norm = frozen_rms_norm(core.affine(values), module.g_norm.weight, _HGRN2_EPS, whole=True)
    operator = Chain(*masked(mask, scan.shape, values), norm, core)
    # the layer reads o_proj by its weight, so an adapter around it would change nothing
    out = module.o_proj
    return LinearMixer(values, operator, lambda y: linear(y.flatten(2), out.weight, out.bias), mask)
