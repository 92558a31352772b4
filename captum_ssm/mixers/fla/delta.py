"""The delta rule: fla's DeltaNet, GatedDeltaNet and KimiDeltaAttention.

    q, k, v = SiLU(conv(.))           q, k on the unit sphere       beta = sigmoid(b_proj h)
    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   s[t] = q[t] . S[t]
    y = SiLU(g) RMSNorm_h(s / sqrt(N))                              output = o_proj(y)

Beta doubles where negative eigenvalues are allowed.  DeltaNet has no decay, other activations and
norms of q and k as options, and the gate as one; GatedDeltaNet has one decay per head,
exp(-exp(A_log) softplus(a_proj h + dt_bias)), and heads that share q and k as an option.
KimiDeltaAttention has the same decay per key channel, or, with a lower bound b for its logarithm,
exp(b sigmoid(exp(A_log) (f_proj h + dt_bias))).  Frozen: q, k, beta, the decays, SiLU(u) / u of the
values, the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import DeltaRule
from ..base import Call, LinearMixer
from ..parts.common import as_heads, run
from .common import closing, convolved, entering_unpadded, o_norm_and_gate, zeroed


def fla_delta_net(module: Any, call: Call) -> LinearMixer:
    """fla's DeltaNet."""
    hidden, mask = entering_unpadded(module, call)
    q, k = (_delta_net_key(module, name, hidden) for name in ("q", "k"))
    beta = torch.ones_like(q[..., 0])
    if module.use_beta:
        beta = torch.sigmoid(run(module.b_proj, hidden))
    if module.allow_neg_eigval:
        beta = 2 * beta
    return _delta_rule(module, hidden, mask, q, k, beta, None)


def fla_gated_delta_net(module: Any, call: Call) -> LinearMixer:
    """fla's GatedDeltaNet."""
    hidden, mask = entering_unpadded(module, call)
    q, k, beta = _shared_operands(module, hidden)
    rate = F.softplus(run(module.a_proj, hidden) + module.dt_bias.to(hidden))
    log_decay = -module.A_log.to(hidden).exp() * rate
    return _delta_rule(module, hidden, mask, q, k, beta, log_decay)


def fla_kda(module: Any, call: Call) -> LinearMixer:
    """fla's KimiDeltaAttention."""
    hidden, mask = entering_unpadded(module, call)
    q, k, beta = _shared_operands(module, hidden)
    a = as_heads(run(module.f_proj, hidden) + module.dt_bias.to(hidden), module.num_v_heads)
    rate = module.A_log.to(hidden).exp()[:, None]
    if module.lower_bound is None:
        log_decay = -rate * F.softplus(a)
    else:
        log_decay = module.lower_bound * torch.sigmoid(rate * a)
    return _delta_rule(module, hidden, mask, q, k, beta, log_decay)


def _shared_operands(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k (B, L, H, N), which groups of heads share, and beta (B, L, H)."""
    shared = module.num_v_heads // module.num_heads
    q, k = (
        _unit(as_heads(_activated(module, name, hidden), module.num_heads)) for name in ("q", "k")
    )
    beta = torch.sigmoid(run(module.b_proj, hidden))
    if module.allow_neg_eigval:
        beta = 2 * beta
    return q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2), beta


def _delta_rule(
    module: Any,
    hidden: Tensor,
    mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
) -> LinearMixer:
    """The mixer from queries and keys (B, L, H, N), beta and log decay (B, L, H)."""
    scan = DeltaRule(
        q * module.head_k_dim**-0.5,
        k,
        beta,
        None if log_decay is None else zeroed(log_decay, mask),
        module.head_v_dim,
    )
    return closing(module, hidden, mask, scan, o_norm_and_gate, silu=True)


def _delta_net_key(module: Any, name: str, hidden: Tensor) -> Tensor:
    """Queries or keys (B, L, H, N) of DeltaNet."""
    if module.qk_activation == "silu":
        x = _activated(module, name, hidden)
    else:
        x = run(getattr(module, f"{name}_proj"), hidden)
        x = convolved(getattr(module, f"{name}_conv1d", None), x)
        if module.qk_activation == "relu":
            x = F.relu(x)
        elif module.qk_activation == "elu":
            x = F.elu(x) + 1
    x = as_heads(x, module.num_heads)
    return _unit(x) if module.qk_norm == "l2" else F.normalize(x, p=1.0, dim=-1, eps=1e-6)


def _activated(module: Any, name: str, hidden: Tensor) -> Tensor:
    """A projection with its short convolution, or SiLU alone where there is none."""
    x = run(getattr(module, f"{name}_proj"), hidden)
    conv = getattr(module, f"{name}_conv1d", None)
    return F.silu(x) if conv is None else convolved(conv, x)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
