"""The gated delta rule of several models of transformers.

They are qwen3_next, qwen3_5, qwen4_exp, olmo_hybrid and kimi_linear. Ling 3 (bailing_hybrid) and
GLM-5.3-Flash (glm5_next) have the mixer of kimi_linear.

    q, k, v = SiLU(conv(W (mask h)))       q = q / |q| / sqrt(N)       k = k / |k|
    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   s[t] = q[t] . S[t]
    y = act(z) w s / rms(s)                output = W_o y

with beta = sigmoid(b), twice that in olmo_hybrid if negative eigenvalues are allowed, and
log decay = -exp(A_log) softplus(a + dt_bias), one per head or, in kimi_linear, one per head and
key channel; where that has a bound, it is bound sigmoid(exp(A_log) (a + dt_bias)).  The norm is per
head.  Frozen: q, k, beta, the decays, the mask, the ratio
SiLU(u) / u, 1 / rms and the gate act(z).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Chain, DeltaRule, Diagonal, Shape, ShortConv
from .base import Call, LinearMixer
from .parts.common import (
    activation_ratio,
    as_heads,
    causal_conv,
    hf_entering,
    masked,
    output_gate,
    refuse_packed,
    run,
)

#: Added to the squared norm of queries and keys, by the models and by their kernels.
_NORM_EPS = 1e-6


def qwen3_next(module: Any, call: Call) -> LinearMixer:
    """transformers' Qwen3NextGatedDeltaNet, whose projections are grouped by key head."""
    refuse_packed(call)
    hidden, mask = hf_entering(module, call)
    split = module.fix_query_key_value_ordering
    query, key, value, z, b, a = split(
        run(module.in_proj_qkvz, hidden), run(module.in_proj_ba, hidden)
    )
    mixed = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], -1)
    operands = torch.sigmoid(b), _log_decay(a, module.A_log, module.dt_bias)
    return _linearize(module, mixed, mask, operands, z, module.norm, module.out_proj)


def qwen3_5(module: Any, call: Call) -> LinearMixer:
    """transformers' Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet, Qwen4ExpTextGatedDeltaNet."""
    refuse_packed(call)
    hidden, mask = hf_entering(module, call)
    beta = torch.sigmoid(run(module.in_proj_b, hidden))
    operands = beta, _log_decay(run(module.in_proj_a, hidden), module.A_log, module.dt_bias)
    gate = as_heads(run(module.in_proj_z, hidden), module.num_v_heads)
    mixed = run(module.in_proj_qkv, hidden)
    return _linearize(module, mixed, mask, operands, gate, module.norm, module.out_proj)


def olmo_hybrid(module: Any, call: Call) -> LinearMixer:
    """transformers' OlmoHybridGatedDeltaNet."""
    refuse_packed(call)
    hidden, mask = hf_entering(module, call)
    beta = torch.sigmoid(run(module.b_proj, hidden)) * (2.0 if module.allow_neg_eigval else 1.0)
    operands = beta, _log_decay(run(module.a_proj, hidden), module.A_log, module.dt_bias)
    gate = as_heads(run(module.g_proj, hidden), module.num_v_heads)
    mixed = _mixed(module, hidden)
    return _linearize(module, mixed, mask, operands, gate, module.o_norm, module.o_proj)


def kimi_delta(module: Any, call: Call) -> LinearMixer:
    """transformers' KimiLinearDeltaAttention and those of Ling 3 and GLM-5.3-Flash after it."""
    refuse_packed(call)
    hidden, mask = hf_entering(module, call)
    beta = torch.sigmoid(run(module.b_proj, hidden))
    operands = beta, _channel_log_decay(module.forget_gate, hidden, module.num_heads)
    gate = as_heads(_one_or_two(module, "g", hidden), module.num_heads)
    mixed = _mixed(module, hidden)
    return _linearize(module, mixed, mask, operands, gate, module.o_norm, module.o_proj)


def _channel_log_decay(forget: Any, hidden: Tensor, heads: int) -> Tensor:
    """Log decays per head and key channel (B, L, H, N), between 0 and a bound if there is one."""
    a = as_heads(_one_or_two(forget, "f", hidden), heads)
    a = a + forget.dt_bias.to(a).view(heads, -1)
    rate: Tensor = forget.A_log.to(a).exp().view(heads, 1)
    bound: float | None = getattr(forget, "safe_gate_lower_bound", None)
    if getattr(forget, "safe_gate", False):
        bound = forget.lower_bound
    if bound is not None:
        return bound * torch.sigmoid(rate * a)
    if hasattr(forget, "f_proj"):
        return -rate * F.softplus(a)
    # the models' own softplus, which rounds log(1 + exp(a)) where a is very negative
    return -rate * torch.where(a > 20, a, torch.log(1 + torch.exp(a)))


def _one_or_two(module: Any, name: str, hidden: Tensor) -> Tensor:
    """Run a projection of ``hidden``, which in some models is two of low rank in a row."""
    if hasattr(module, f"{name}_proj"):
        return run(getattr(module, f"{name}_proj"), hidden)
    first, second = (getattr(module, f"{name}_{part}_proj") for part in "ab")
    return run(second, run(first, hidden))


def _mixed(module: Any, hidden: Tensor) -> Tensor:
    return torch.cat([run(p, hidden) for p in (module.q_proj, module.k_proj, module.v_proj)], -1)


def _log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    return -a_log.to(a).exp() * F.softplus(a + dt_bias.to(a))


def _linearize(
    module: Any,
    mixed: Tensor,
    mask: Tensor | None,
    operands: tuple[Tensor, Tensor],
    z: Tensor,
    norm: Any,
    out_proj: Any,
) -> LinearMixer:
    """The mixer from its projections.

    Args:
        module: the mixer, for conv1d, num_k_heads and its activation.
        mixed: queries, keys and values side by side, the convolution's input.
        mask: True for real tokens (B, L), or None.
        operands: beta and log decay, (B, L, H) each, or the latter (B, L, H, N).
        z: the gate's input (B, L, H, P).
        norm, out_proj: modules of the mixer.
    """
    heads, per_head = z.shape[-2:]
    beta, log_decay = operands
    shape = Shape(mixed.shape[0], mixed.shape[1], heads, per_head)
    width = heads * per_head  # the values come last
    channels = as_heads(mixed)
    conv, u = causal_conv(module.conv1d, channels, mask, Shape(*channels.shape))
    name = _after_convolution(module)
    ratio = activation_ratio(_activation(name), name, u)
    activated = u * ratio
    query, key = _units(activated[:, :, :-width, 0], getattr(module, "num_k_heads", heads), heads)
    value = activated[:, :, -width:].view(shape)
    scan = DeltaRule(query * query.shape[-1] ** -0.5, key, beta, log_decay, per_head)
    mixing = scan.apply(value)
    rms = torch.rsqrt(mixing.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    bias = conv.bias
    if bias is not None:
        bias = bias[:, :, -width:].reshape(*bias.shape[:2], heads, per_head)
    operator = Chain(
        output_gate(_activation(getattr(norm, "activation", "silu")), z),
        Diagonal(rms * norm.weight.to(rms), shape, "norm"),
        scan,
        Diagonal(ratio[:, :, -width:].view(shape), shape, "activation"),
        ShortConv(conv.weight[-width:].view(heads, per_head, -1), shape, bias),
        *masked(mask, shape, mixed),
    )
    values = mixed[:, :, -width:].reshape(shape)
    return LinearMixer(values, operator, lambda y: run(out_proj, y.flatten(2)), mask)


def _units(x: Tensor, key_heads: int, heads: int) -> tuple[Tensor, ...]:
    """Queries and keys of length one, each repeated for the value heads that its head serves."""
    x = as_heads(x, 2 * key_heads)
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
    x = x if heads == key_heads else x.repeat_interleave(heads // key_heads, 2)
    return x.chunk(2, 2)


def _after_convolution(module: Any) -> str:
    """The name of the convolution's activation; transformers 4 without its kernel has only SiLU."""
    of_version_4 = hasattr(module, "causal_conv1d_fn")
    if of_version_4 and module.causal_conv1d_fn is None:
        return "silu"
    name: str = module.activation
    return name


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN[name]
