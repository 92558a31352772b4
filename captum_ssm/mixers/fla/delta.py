"""The delta rule: fla's DeltaNet, GatedDeltaNet, KimiDeltaAttention, GatedDeltaProduct and Comba.

    q, k, v = SiLU(conv(.))           q, k on the unit sphere       beta = sigmoid(b_proj h)
    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   s[t] = q[t] . S[t]
    y = act(g) RMSNorm_h(s / sqrt(N))                              output = o_proj(y)

Beta is doubled if negative eigenvalues are allowed.  DeltaNet has no decay; its options are the
activations and norms of q and k, and the gate.  The other layers have one decay per head,
exp(-exp(A_log) softplus(a_proj h + dt_bias)), and optionally heads that share q and k.
KimiDeltaAttention has the same decay per key channel, or, with a lower bound b of the decay's
logarithm, exp(b sigmoid(exp(A_log) (f_proj h + dt_bias))).

GatedDeltaProduct takes M steps at every token, each with a separate key and value:

    S = decay[t] S,   then for each m:   S += beta[t, m] k[t, m] (v[t, m] - k[t, m] . S)

Its decay is optional.  The values of every step are separate heads, which are summed before the
output projection.  Comba has an erasing key p = sigmoid(decay) k, and queries q - D p:

    S[t] = decay[t] S[t-1] + beta[t] k[t] (v[t] - p[t] . S[t-1]),   s[t] = q[t] . S[t]

So p reads the state before its decay.  Comba's kernels also normalize p to length one.

Frozen: q, k, p, beta, the decays, SiLU(u) / u of the values, the norm's statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import DeltaProduct, DeltaRule
from ..base import Call, LinearMixer
from ..parts.common import as_heads, projection, run, unit_vectors, zeroed
from .common import gate_act, project, to_mixer, value_path, zeroed_input_and_mask


def fla_delta_net(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's DeltaNet: a delta rule without decay."""
    hidden, mask = zeroed_input_and_mask(module, call)
    q, k = (_queries_or_keys(module, name, hidden) for name in "qk")
    beta = _beta(module, hidden) if module.use_beta else torch.ones_like(q[..., 0])
    if module.allow_neg_eigval and not module.use_beta:
        beta = 2 * beta  # _beta doubles its result itself
    return _linearize(module, hidden, mask, q, k, beta, None)


def fla_gated_delta_net(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's GatedDeltaNet: a delta rule with one decay per head."""
    hidden, mask = zeroed_input_and_mask(module, call)
    q, k = _queries_and_keys(module, hidden)
    beta, log_decay = _beta(module, hidden), _log_decay(module, hidden)
    return _linearize(module, hidden, mask, q, k, beta, log_decay)


def fla_kda(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's KimiDeltaAttention: a delta rule with a decay per key channel."""
    hidden, mask = zeroed_input_and_mask(module, call)
    a = as_heads(run(module.f_proj, hidden) + module.dt_bias.to(hidden), module.num_v_heads)
    rate = module.A_log.to(hidden).exp()[:, None]
    if module.lower_bound is None:
        log_decay = -rate * F.softplus(a)
    else:
        log_decay = module.lower_bound * torch.sigmoid(rate * a)
    q, k = _queries_and_keys(module, hidden)
    return _linearize(module, hidden, mask, q, k, _beta(module, hidden), log_decay)


def fla_delta_product(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's GatedDeltaProduct: several steps of a delta rule per token."""
    hidden, mask = zeroed_input_and_mask(module, call)
    steps, heads = module.num_householder, module.num_v_heads
    q, k = _queries_and_keys(module, hidden, steps)
    beta, log_decay = _beta(module, hidden), None
    if module.use_forget_gate:
        log_decay = zeroed(_log_decay(module, hidden), mask).repeat(1, 1, steps)
    # head m * heads + h has the values of step m; q, keys, beta and decays are the same for each m
    scan = DeltaProduct(
        q.repeat(1, 1, steps, 1) * module.head_k_dim**-0.5,
        torch.unflatten(k, 2, (steps, heads)).repeat(1, 1, 1, steps, 1),
        torch.unflatten(beta, 2, (steps, heads)).repeat(1, 1, 1, steps),
        log_decay,
        writes=[step for step in range(steps) for _ in range(heads)],
        per_head=module.head_v_dim,
    )
    path = value_path(module, hidden, mask, module.head_v_dim, silu=True).scan(scan)
    # the norm applies to the sum over steps
    norm, summed = module.o_norm, torch.unflatten(path.now, 2, (steps, heads)).sum(2)
    factor = torch.rsqrt(summed.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.to(summed)
    path.scale(factor.repeat(1, 1, steps, 1), "norm")
    if module.use_output_gate:
        path.gate(run(module.g_proj, hidden).repeat(1, 1, steps), gate_act(norm))
    out = projection(module.o_proj)
    return path.silence().to(lambda y: out(torch.unflatten(y, -1, (steps, -1)).sum(-2)))


def fla_comba(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's Comba: a delta rule with an erasing key p and queries q - D p."""
    hidden, mask = zeroed_input_and_mask(module, call)
    q, k = (as_heads(project(module, n, hidden, True), module.num_heads) for n in "qk")
    p = k
    if module.use_inner_decay:
        p = torch.sigmoid(module.decay.to(k))[:, None] * k
    if module.use_output_correction:
        q = q - module.D.to(q)[:, None] * p
    values_per_key = module.num_v_heads // module.num_heads
    q, k, p = (unit_vectors(x).repeat_interleave(values_per_key, 2) for x in (q, k, p))
    beta, log_decay = torch.sigmoid(run(module.b_proj, hidden)), _log_decay(module, hidden)
    return _linearize(module, hidden, mask, q, k, beta, log_decay, erase=p)


def _linearize(
    module: Any,
    hidden: Tensor,
    mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None = None,
) -> LinearMixer:
    """Return the mixer from q, k and erasing keys (B, L, H, N), beta (B, L, H) and log decays."""
    path = value_path(module, hidden, mask, module.head_v_dim, silu=True)
    log_decay = None if log_decay is None else zeroed(log_decay, mask)
    q = q * module.head_k_dim**-0.5
    path.scan(DeltaRule(q, k, beta, log_decay, module.head_v_dim, erase=erase))
    gated = getattr(module, "use_gate", getattr(module, "use_output_gate", True))
    return to_mixer(module, hidden, path, module.o_norm, gate_act(module.o_norm) if gated else None)


def _queries_and_keys(module: Any, hidden: Tensor, steps: int = 1) -> tuple[Tensor, ...]:
    """Return q and k (B, L, H, N), repeated for heads that share them; k has steps * H heads."""
    heads, values_per_key = module.num_heads, module.num_v_heads // module.num_heads
    pairs = (("q", heads), ("k", steps * heads))
    vectors = (as_heads(project(module, name, hidden, silu=True), count) for name, count in pairs)
    return tuple(unit_vectors(x).repeat_interleave(values_per_key, 2) for x in vectors)


def _beta(module: Any, hidden: Tensor) -> Tensor:
    beta = torch.sigmoid(run(module.b_proj, hidden))
    return 2 * beta if module.allow_neg_eigval else beta


def _log_decay(module: Any, hidden: Tensor) -> Tensor:
    rate: Tensor = module.A_log.to(hidden).exp()
    return -rate * F.softplus(run(module.a_proj, hidden) + module.dt_bias.to(hidden))


def _queries_or_keys(module: Any, name: str, hidden: Tensor) -> Tensor:
    """Return queries or keys (B, L, H, N) of DeltaNet, activated and normalized."""
    x = project(module, name, hidden, silu=module.qk_activation == "silu")
    if module.qk_activation == "relu":
        x = F.relu(x)
    elif module.qk_activation == "elu":
        x = F.elu(x) + 1
    x = as_heads(x, module.num_heads)
    return unit_vectors(x) if module.qk_norm == "l2" else F.normalize(x, p=1.0, dim=-1, eps=1e-6)
