"""Delta rules of several or of corrected steps: fla's GatedDeltaProduct and Comba.

    q, k, v = SiLU(conv(.))           q, k on the unit sphere       beta = sigmoid(b_proj h)

GatedDeltaProduct takes M steps at every token, each with a key and a value of its own:

    S = decay[t] S,   then for each m:   S += beta[t, m] k[t, m] (v[t, m] - k[t, m] . S)

It has beta twice as large where negative eigenvalues are allowed, and no decay as an option.  The
values of every step are heads of their own, which the output projection adds up.  Comba erases by
p = sigmoid(decay) k, and asks with q - D p:

    S[t] = decay[t] S[t-1] + beta[t] k[t] (v[t] - p[t] . S[t-1]),   s[t] = q[t] . S[t]

so that it erases of the state before that decays.  Its kernels put p, too, on the unit sphere.
Both go on as

    y = act(g) RMSNorm_h(s / sqrt(N))                              output = o_proj(y)

with one decay per head, exp(-exp(A_log) softplus(a_proj h + dt_bias)), act being SiLU, in Comba
sigmoid.  Frozen: q, k, p, beta, the decays, SiLU(u) / u of the values, the norm's statistics and
the gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import DeltaProduct, DeltaRule, Diagonal, Operator, Shape
from ..base import Call, LinearMixer
from ..parts.common import as_heads, output_gate, run
from .common import closing, convolved, entering_unpadded, frozen_rms_norm, zeroed

#: Added to the squared norm of queries and keys.
_NORM_EPS = 1e-6


def fla_gated_delta_product(module: Any, call: Call) -> LinearMixer:
    """fla's GatedDeltaProduct."""
    hidden, mask = entering_unpadded(module, call)
    count, heads = module.num_householder, module.num_v_heads
    q, k = (_activated(module, name, hidden) for name in ("q", "k"))
    q, k = as_heads(q, module.num_heads), as_heads(k, count * module.num_heads)
    q, k = (_unit(x).repeat_interleave(heads // module.num_heads, 2) for x in (q, k))
    beta = torch.sigmoid(run(module.b_proj, hidden))
    if module.allow_neg_eigval:
        beta = 2 * beta
    log_decay = None
    if module.use_forget_gate:
        log_decay = zeroed(_log_decay(module, hidden), mask).repeat(1, 1, count)
    scan = DeltaProduct(
        q.repeat(1, 1, count, 1) * module.head_k_dim**-0.5,
        torch.unflatten(k, 2, (count, heads)).repeat(1, 1, 1, count, 1),
        torch.unflatten(beta, 2, (count, heads)).repeat(1, 1, 1, count),
        log_decay,
        [step for step in range(count) for _ in range(heads)],
        module.head_v_dim,
    )

    def after(module: Any, hidden: Tensor, o: Tensor) -> list[Operator]:
        return _norm_and_gate(module, hidden, o, count)

    linear = closing(module, hidden, mask, scan, after, silu=True)
    project = linear.project
    return replace(linear, project=lambda y: project(_added(y, count)))


def fla_comba(module: Any, call: Call) -> LinearMixer:
    """fla's Comba."""
    hidden, mask = entering_unpadded(module, call)
    q, k = (as_heads(_activated(module, name, hidden), module.num_heads) for name in ("q", "k"))
    p = k
    if module.use_inner_decay:
        p = torch.sigmoid(module.decay.to(k))[:, None] * k
    if module.use_output_correction:
        q = q - module.D.to(q)[:, None] * p
    shared = module.num_v_heads // module.num_heads
    q, k, p = (_unit(x).repeat_interleave(shared, 2) for x in (q, k, p))
    scan = DeltaRule(
        q * module.head_k_dim**-0.5,
        k,
        torch.sigmoid(run(module.b_proj, hidden)),
        zeroed(_log_decay(module, hidden), mask),
        module.head_v_dim,
        erase=p,
    )
    return closing(module, hidden, mask, scan, _norm_and_gate, silu=True)


def _norm_and_gate(module: Any, hidden: Tensor, o: Tensor, count: int = 1) -> list[Operator]:
    """The output gate, if there is one, and the RMSNorm per head of the sum over steps."""
    norm, shape = module.o_norm, Shape(*o.shape)
    scaling = frozen_rms_norm(_added(o, count), norm.weight, norm.eps, whole=False)
    parts: list[Operator] = [Diagonal(scaling.weight.repeat(1, 1, count, 1), shape, "norm")]
    if module.use_output_gate:
        g = as_heads(run(module.g_proj, hidden), module.num_v_heads).repeat(1, 1, count, 1)
        parts.insert(0, output_gate(torch.sigmoid if norm.activation == "sigmoid" else F.silu, g))
    return parts


def _added(y: Tensor, count: int) -> Tensor:
    """Sum the outputs of the heads of all steps, (B, L, M H, P) to (B, L, H, P)."""
    return torch.unflatten(y, 2, (count, -1)).sum(2)


def _activated(module: Any, name: str, hidden: Tensor) -> Tensor:
    """A projection with its short convolution, or SiLU alone where there is none."""
    x = run(getattr(module, f"{name}_proj"), hidden)
    conv = getattr(module, f"{name}_conv1d", None)
    return F.silu(x) if conv is None else convolved(conv, x)


def _log_decay(module: Any, hidden: Tensor) -> Tensor:
    rate: Tensor = module.A_log.to(hidden).exp()
    return -rate * F.softplus(run(module.a_proj, hidden) + module.dt_bias.to(hidden))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
