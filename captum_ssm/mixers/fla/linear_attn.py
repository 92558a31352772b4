"""Linear attention: fla's LinearAttention, BasedLinearAttention and SimpleGatedLinearAttention.

    alpha_h[i, j] = phi(q_h[i]) . phi(k_h[j]) / sqrt(N),   j <= i
    y = RMSNorm_h(alpha v)                                  output = o_proj(y)

with N features phi.  LinearAttention may divide the features by their sum, and the rows of alpha by
theirs, as Based always does, whose products of features are 1 + x + x^2 / 2 for x = q . k / sqrt(N)
and which has no norm.  SimpleGatedLinearAttention has a decay sigmoid(gk)^(1/16) per head in place
of features, short convolutions, and the norm and the gate of GLA.  Frozen: q, k, the decays, the
sums of rows, the convolution's SiLU(u) / u, the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UnsupportedMixerError
from ...operators import Chain, Diagonal, Operator, ScalarDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, run, working_dtype
from .common import (
    closing,
    convolved,
    entering,
    entering_unpadded,
    frozen_rms_norm,
    norm_and_gate,
    value_stream,
    zeroed,
)

#: Added by LinearAttention to the sum of features, and by its kernels to the sum of a row.
_FEATURES_EPS, _ROWS_EPS = 1e-4, 1e-10
#: Added by Based's own kernel to the sum of a row.
_BASED_EPS = 1e-6


def fla_linear_attention(module: Any, call: Call) -> LinearMixer:
    """fla's LinearAttention."""
    hidden, mask = entering_unpadded(module, call)
    groups = module.num_kv_groups
    q = as_heads(run(module.q_proj, hidden), module.num_heads)
    k = as_heads(run(module.k_proj, hidden), module.num_kv_heads).repeat_interleave(groups, 2)
    q, k = _features(module.feature_map_q, q), _features(module.feature_map_k, k)
    if module.norm_q:
        q = q / (q.sum(-1, keepdim=True) + _FEATURES_EPS)
    if module.norm_k:
        k = k / (k.sum(-1, keepdim=True) + _FEATURES_EPS)
    eps = _ROWS_EPS if module.do_feature_map_norm else None
    scan = _attention(q * q.shape[-1] ** -0.5, zeroed(k, mask), module.head_v_dim, eps)
    return closing(module, hidden, mask, scan, _norm, repeat=groups)


def fla_based(module: Any, call: Call) -> LinearMixer:
    """fla's BasedLinearAttention, which knows neither padding nor caches."""
    if not module.causal:
        raise UnsupportedMixerError(
            "BasedLinearAttention with causal=False has no adapter. Supported is causal=True."
        )
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    q, k, values = (
        as_heads(run(p, hidden), module.num_heads)
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    eps = _BASED_EPS if module.mode == "parallel" else _ROWS_EPS
    scan = _attention(_taylor(q), _taylor(k), values.shape[-1], eps)
    return LinearMixer(values, scan, lambda y: run(module.o_proj, y.flatten(2)))


def fla_simple_gla(module: Any, call: Call) -> LinearMixer:
    """fla's SimpleGatedLinearAttention; padded tokens write nothing, but read."""
    hidden, mask = entering(module, call)
    groups = module.num_kv_groups
    q, k = (_convolved_key(module, name, hidden, mask) for name in "qk")
    q, k = as_heads(q, module.num_heads), as_heads(k, module.num_kv_heads)
    log_decay = F.logsigmoid(run(module.gk_proj, hidden)) / module.gate_logit_normalizer
    scan = ScalarDecayHeads(
        q * module.head_k_dim**-0.5,
        k.repeat_interleave(groups, 2),
        zeroed(log_decay, mask),
        None,
        module.head_v_dim,
    )
    conv = getattr(module, "v_conv1d", None)
    values, inner = value_stream(
        run(module.v_proj, hidden), conv, mask, module.head_v_dim, repeat=groups
    )
    core = Chain(scan, *inner)
    operator = Chain(*norm_and_gate(module, hidden, core.affine(values)), core)
    return LinearMixer(values, operator, lambda y: run(module.o_proj, y.flatten(2)), mask)


def _features(feature_map: Any, x: Tensor) -> Tensor:
    """Apply a feature map, a module or the function ELU plus 1."""
    return run(feature_map, x) if isinstance(feature_map, nn.Module) else F.elu(x) + 1


def _taylor(x: Tensor) -> Tensor:
    """Features (B, L, H, 1 + N + N^2) whose products are the series of exp(q . k / sqrt(N))."""
    width = x.shape[-1]
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2)
    ones = torch.ones_like(x[..., :1])
    return torch.cat([ones, x * width**-0.25, squares * (2 * width) ** -0.5], -1)


def _attention(q: Tensor, k: Tensor, per_head: int, eps: float | None) -> Operator:
    """Attention without decay; its rows are divided by their sums plus eps unless that is None."""
    no_decay = torch.zeros_like(q[..., 0])
    scan = ScalarDecayHeads(q, k, no_decay, None, per_head)
    if eps is None:
        return scan
    rows = (q * k.cumsum(1)).sum(-1, keepdim=True).detach()
    return Chain(Diagonal(1 / (rows + eps), scan.shape, "scan"), scan)


def _convolved_key(module: Any, name: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Queries or keys (B, L, C) of SimpleGatedLinearAttention."""
    x = run(getattr(module, f"{name}_proj"), hidden)
    conv = getattr(module, f"{name}_conv1d", None)
    if conv is not None:
        x = convolved(conv, zeroed(x, mask))
    return x if module.feature_map_fn is None else module.feature_map_fn(x)


def _norm(module: Any, _: Tensor, o: Tensor) -> list[Operator]:
    """The per-head RMSNorm of LinearAttention, if it has one."""
    norm = module.norm
    if isinstance(norm, nn.Identity):
        return []
    return [frozen_rms_norm(o, norm.weight, norm.eps, whole=False)]
