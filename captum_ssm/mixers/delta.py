"""The gated delta rule in models of the transformers library.

The models are qwen3_next, qwen3_5, qwen4_exp, olmo_hybrid and kimi_linear. Ling 3 (bailing_hybrid)
and GLM-5.3-Flash (glm5_next) have the mixer of kimi_linear.

    q, k, v = SiLU(conv(W (mask h)))       q = q / |q| / sqrt(N)       k = k / |k|
    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   s[t] = q[t] . S[t]
    y = act(z) w s / rms(s)                output = W_o y

Here beta = sigmoid(b), or 2 sigmoid(b) in olmo_hybrid if negative eigenvalues are allowed.  The
log decay is -exp(A_log) softplus(a + dt_bias), one per head or, in kimi_linear, one per head and
key channel; with a lower bound it is bound sigmoid(exp(A_log) (a + dt_bias)).  The norm is per
head.  Frozen: q, k, beta, the decays, the mask, the ratio SiLU(u) / u, 1 / rms and the gate act(z).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import DeltaRule
from .base import Call, LinearMixer
from .parts.common import as_heads, hf_input_and_mask, refuse_packed, run, unit_vectors
from .path import Path


def qwen3_next(module: Any, call: Call) -> LinearMixer:
    """Linearize Qwen3NextGatedDeltaNet, whose projections are grouped by key head."""
    refuse_packed(call)
    hidden, mask = hf_input_and_mask(module, call)
    projected = run(module.in_proj_qkvz, hidden), run(module.in_proj_ba, hidden)
    query, key, value, z, b, a = module.fix_query_key_value_ordering(*projected)
    qkv = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], -1)
    beta, log_decay = b.sigmoid(), _log_decay(module, a)
    path = _delta_rule(module, qkv, mask, beta, log_decay, module.num_v_heads)
    return _norm_and_gate(path, module.norm, z).to(module.out_proj)


def qwen3_5(module: Any, call: Call) -> LinearMixer:
    """Linearize Qwen3_5[Moe]GatedDeltaNet or Qwen4ExpTextGatedDeltaNet."""
    refuse_packed(call)
    hidden, mask = hf_input_and_mask(module, call)
    beta = torch.sigmoid(run(module.in_proj_b, hidden))
    log_decay = _log_decay(module, run(module.in_proj_a, hidden))
    qkv = run(module.in_proj_qkv, hidden)
    path = _delta_rule(module, qkv, mask, beta, log_decay, module.num_v_heads)
    return _norm_and_gate(path, module.norm, run(module.in_proj_z, hidden)).to(module.out_proj)


def olmo_hybrid(module: Any, call: Call) -> LinearMixer:
    """Linearize transformers' OlmoHybridGatedDeltaNet: a delta rule with a decay per head."""
    refuse_packed(call)
    hidden, mask = hf_input_and_mask(module, call)
    beta = torch.sigmoid(run(module.b_proj, hidden)) * (2.0 if module.allow_neg_eigval else 1.0)
    log_decay = _log_decay(module, run(module.a_proj, hidden))
    path = _delta_rule(module, _qkv(module, hidden), mask, beta, log_decay, module.num_v_heads)
    return _norm_and_gate(path, module.o_norm, run(module.g_proj, hidden)).to(module.o_proj)


def kimi_delta(module: Any, call: Call) -> LinearMixer:
    """Linearize KimiLinearDeltaAttention, or the same mixer in Ling 3 or GLM-5.3-Flash."""
    refuse_packed(call)
    hidden, mask = hf_input_and_mask(module, call)
    beta, heads = torch.sigmoid(run(module.b_proj, hidden)), module.num_heads
    log_decay = _channel_log_decay(module.forget_gate, hidden, heads)
    path = _delta_rule(module, _qkv(module, hidden), mask, beta, log_decay, heads)
    return _norm_and_gate(path, module.o_norm, _project(module, "g", hidden)).to(module.o_proj)


def _delta_rule(
    module: Any, qkv: Tensor, mask: Tensor | None, beta: Tensor, log_decay: Tensor, heads: int
) -> Path:
    """Return the :class:`.Path` after convolution, activation and delta rule.

    Args:
        module: the mixer; its conv1d, num_k_heads and activation are used.
        qkv: input of the convolution: queries, keys and values, concatenated along channels.
        mask: True for real tokens (B, L), or None.
        beta: step sizes (B, L, H).
        log_decay: logarithms of the decays (B, L, H) or (B, L, H, N).
        heads: number of value heads, H.
    """
    path = Path(qkv, mask).conv(module.conv1d).act(_activation(_activation_name(module)))
    key_heads = getattr(module, "num_k_heads", heads)
    width = heads * (module.head_v_dim if hasattr(module, "head_v_dim") else module.head_dim)
    queries_and_keys = unit_vectors(as_heads(path.now[:, :, :-width, 0], 2 * key_heads))
    # neighboring value heads share a query and a key
    query, key = queries_and_keys.repeat_interleave(heads // key_heads, 2).chunk(2, 2)
    path = path.narrow(-width, width, heads)  # the values
    value_size = path.shape.per_head
    return path.scan(DeltaRule(query * query.shape[-1] ** -0.5, key, beta, log_decay, value_size))


def _norm_and_gate(path: Path, norm: Any, z: Tensor) -> Path:
    """Apply the norm per head and the gate act(z); the module ``norm`` computes both."""
    path.rms_norm(norm.weight, norm.variance_epsilon)
    return path.gate(z, _activation(getattr(norm, "activation", "silu")))


def _channel_log_decay(forget_gate: Any, hidden: Tensor, heads: int) -> Tensor:
    """Return log decays (B, L, H, N) per key channel; some models have a lower bound.

    They are -exp(A_log) softplus(a + dt_bias), or bound sigmoid(exp(A_log) (a + dt_bias)).
    """
    a = as_heads(_project(forget_gate, "f", hidden), heads)
    a = a + forget_gate.dt_bias.to(a).view(heads, -1)
    rate: Tensor = forget_gate.A_log.to(a).exp().view(heads, 1)
    bound: float | None = getattr(forget_gate, "safe_gate_lower_bound", None)  # Kimi Linear
    if getattr(forget_gate, "safe_gate", False):  # Ling 3
        bound = forget_gate.lower_bound
    if bound is not None:
        return bound * torch.sigmoid(rate * a)
    if hasattr(forget_gate, "f_proj"):  # GLM-5.3-Flash
        return -rate * F.softplus(a)
    # the models' own softplus, which rounds log(1 + exp(a)) to 0 for very negative a
    return -rate * torch.where(a > 20, a, torch.log(1 + torch.exp(a)))


def _project(module: Any, name: str, hidden: Tensor) -> Tensor:
    """Project ``hidden`` by ``{name}_proj``, or by ``{name}_a_proj`` and then ``{name}_b_proj``."""
    if hasattr(module, f"{name}_proj"):
        return run(getattr(module, f"{name}_proj"), hidden)
    down, up = (getattr(module, f"{name}_{letter}_proj") for letter in "ab")
    return run(up, run(down, hidden))


def _qkv(module: Any, hidden: Tensor) -> Tensor:
    return torch.cat([run(p, hidden) for p in (module.q_proj, module.k_proj, module.v_proj)], -1)


def _log_decay(module: Any, a: Tensor) -> Tensor:
    rate: Tensor = module.A_log.to(a).exp()
    return -rate * F.softplus(a + module.dt_bias.to(a))


def _activation_name(module: Any) -> str:
    """Return the name of the convolution's activation; SiLU in transformers 4 without a kernel."""
    is_of_version_4 = hasattr(module, "causal_conv1d_fn")
    if is_of_version_4 and module.causal_conv1d_fn is None:
        return "silu"
    activation: str = module.activation
    return activation


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN[name]
