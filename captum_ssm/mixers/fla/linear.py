"""Linear attention: fla's RetNet, GLA, LinearAttention, Based and SimpleGatedLinearAttention.

    alpha_h[i, j] = phi(q_h[i]) . (product of decays j+1..i) phi(k_h[j]) / sqrt(N),   j <= i
    y = act(g) RMSNorm_h(alpha v)                           output = o_proj(y)

phi has N features.  Decays and norms are

RetNet           rotated q and k, decay 1 - 2^(-5 - h)
GLA              decay sigmoid(gk)^(1/16), one per key channel
SimpleGLA        decay sigmoid(gk)^(1/16), one per head
LinearAttention  no decay and no gate; it may divide features by their sum, and each row of alpha by
                 the row's sum
Based            no decay, norm or gate; products of features are 1 + x + x^2 / 2 for
                 x = q . k / sqrt(N), and each row of alpha is divided by the row's sum

Queries, keys and values have short convolutions with SiLU if the layer has them, and groups of
heads may share keys and values.  Frozen: q, k, the decays, the sums of rows, the ratio SiLU(u) / u
after the convolution, the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UnsupportedMixerError
from ...operators import ScalarDecayHeads, VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, mixer_input, run, zeroed
from ..path import Path
from .common import (
    input_and_mask,
    norm_and_gate_act,
    project,
    queries_and_keys,
    rotate,
    to_mixer,
    value_path,
    zeroed_input_and_mask,
)

#: eps that LinearAttention adds to the sum of features, and to the sum of a row.
_FEATURES_EPS, _ROWS_EPS = 1e-4, 1e-10
#: eps that Based's kernel adds to the sum of a row.
_BASED_EPS = 1e-6


def fla_retention(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's MultiScaleRetention: linear attention with a fixed decay per head."""
    hidden, mask = zeroed_input_and_mask(module, call)
    q, k = (rotate(module.rotary, mask, x) for x in queries_and_keys(module, hidden))
    head = torch.arange(module.num_heads, dtype=q.dtype, device=q.device)
    log_decay = zeroed(torch.log1p(-(2.0 ** (-5 - head))).expand(*q.shape[:3]), mask)
    path = _value_path(module, hidden, mask)
    _scalar_scan(module, path, q, k, log_decay)
    return to_mixer(module, hidden, path, *norm_and_gate_act(module))


def fla_gla(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's GatedLinearAttention: linear attention with a decay per key channel."""
    hidden, mask = zeroed_input_and_mask(module, call)
    groups = module.num_kv_groups
    q, k = queries_and_keys(module, hidden)
    log_decay = F.logsigmoid(run(module.gk_proj, hidden)) / module.gate_logit_normalizer
    if module.clamp_min is not None:
        log_decay = torch.clamp_min(log_decay, module.clamp_min)
    log_decay = as_heads(log_decay, module.num_kv_heads)
    k, log_decay = (x.repeat_interleave(groups, 2) for x in (k, log_decay))
    log_decay = zeroed(log_decay, mask)
    path = _value_path(module, hidden, mask)
    path.scan(VectorDecayHeads(q * module.head_k_dim**-0.5, k, log_decay, module.head_v_dim))
    return to_mixer(module, hidden, path, *norm_and_gate_act(module))


def fla_simple_gla(module: Any, call: Call) -> LinearMixer:
    """Linearize SimpleGatedLinearAttention, which, unlike GLA, does not remove padded tokens."""
    hidden, mask = input_and_mask(module, call)
    features = module.feature_map_fn or (lambda x: x)
    q, k = (features(project(module, name, hidden, mask=mask)) for name in "qk")
    q, k = as_heads(q, module.num_heads), as_heads(k, module.num_kv_heads)
    log_decay = F.logsigmoid(run(module.gk_proj, hidden)) / module.gate_logit_normalizer
    path = _value_path(module, hidden, mask)
    _scalar_scan(module, path, q, k, zeroed(log_decay, mask))
    norm, act = norm_and_gate_act(module)
    path.rms_norm(norm.weight, norm.eps)
    if act is not None:
        path.gate(run(module.g_proj, hidden), act)
    return path.to(module.o_proj)


def fla_linear_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's LinearAttention: linear attention without decay and gate."""
    hidden, mask = zeroed_input_and_mask(module, call)
    q = as_heads(run(module.q_proj, hidden), module.num_heads)
    k = as_heads(run(module.k_proj, hidden), module.num_kv_heads)
    k = k.repeat_interleave(module.num_kv_groups, 2)
    q, k = _apply_feature_map(module.feature_map_q, q), _apply_feature_map(module.feature_map_k, k)
    if module.norm_q:
        q = q / (q.sum(-1, keepdim=True) + _FEATURES_EPS)
    if module.norm_k:
        k = k / (k.sum(-1, keepdim=True) + _FEATURES_EPS)
    path = _value_path(module, hidden, mask)
    eps = _ROWS_EPS if module.do_feature_map_norm else None
    _linear_attention(path, q * q.shape[-1] ** -0.5, zeroed(k, mask), eps)
    norm = None if isinstance(module.norm, nn.Identity) else module.norm
    return to_mixer(module, hidden, path, norm)


def fla_based(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's BasedLinearAttention, which takes no mask and no cache."""
    if not module.causal:
        raise UnsupportedMixerError(
            "BasedLinearAttention with causal=False has no adapter. Create it with causal=True."
        )
    hidden, heads = mixer_input(module, call), module.num_heads
    q, k = (as_heads(run(p, hidden), heads) for p in (module.q_proj, module.k_proj))
    eps = _BASED_EPS if module.mode == "parallel" else _ROWS_EPS  # of its kernel
    path = Path(run(module.v_proj, hidden), heads=heads)
    return _linear_attention(path, _taylor_features(q), _taylor_features(k), eps).to(module.o_proj)


def _value_path(module: Any, hidden: Tensor, mask: Tensor | None) -> Path:
    return value_path(module, hidden, mask, module.head_v_dim, repeat=module.num_kv_groups)


def _scalar_scan(module: Any, path: Path, q: Tensor, k: Tensor, log_decay: Tensor) -> Path:
    q, k = q * module.head_k_dim**-0.5, k.repeat_interleave(module.num_kv_groups, 2)
    return path.scan(ScalarDecayHeads(q, k, log_decay, None, module.head_v_dim))


def _apply_feature_map(feature_map: Any, x: Tensor) -> Tensor:
    """Apply the feature map if it is a module, otherwise ELU(x) + 1."""
    return run(feature_map, x) if isinstance(feature_map, nn.Module) else F.elu(x) + 1


def _taylor_features(x: Tensor) -> Tensor:
    """Return features with products 1 + x + x^2 / 2 of q and k, for x = q . k / sqrt(N)."""
    width = x.shape[-1]
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2)
    ones = torch.ones_like(x[..., :1])
    return torch.cat([ones, x * width**-0.25, squares * (2 * width) ** -0.5], -1)


def _linear_attention(path: Path, q: Tensor, k: Tensor, eps: float | None) -> Path:
    """Apply linear attention without decay; if ``eps`` is set, divide rows by their sums + eps."""
    path.scan(ScalarDecayHeads(q, k, torch.zeros_like(q[..., 0]), None, path.shape.per_head))
    if eps is None:
        return path
    row_sums = (q * k.cumsum(1)).sum(-1, keepdim=True).detach()
    return path.scale(1 / (row_sums + eps), "scan")
