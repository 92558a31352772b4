"""Gated slot attention: fla's GatedSlotAttention.

    a[t] = sigmoid(f_proj h)^(1/8), one per slot
    K[t] = diag(a[t]) K[t-1] + (1 - a[t]) k[t]^T          p[t] = softmax(scale K[t] q[t])
    V[t] = diag(a[t]) V[t-1] + (1 - a[t]) v[t]^T          s[t] = p[t] . V[t]
    y = RMSNorm(SiLU(s))                                  output = o_proj(y)

Queries and keys pass a feature map, values SiLU; before that each passes a short convolution with
SiLU if the layer has them.  p being frozen, this is linear attention with a decay per slot: p
queries, 1 - a are keys.  Frozen: p, a, the ratios SiLU(u) / u and the norm's statistics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import Chain, Diagonal, VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, linear, masked, run
from .common import convolved, entering_unpadded, frozen_rms_norm, value_stream, zeroed

#: The norm runs as a function that does not get the module's eps.
_EPS = 1e-5
#: Tokens of a chunk: of so many all products of decays are held.
_TOKENS = 16


def fla_gsa(module: Any, call: Call) -> LinearMixer:
    """fla's GatedSlotAttention."""
    hidden, mask = entering_unpadded(module, call)
    groups = module.num_kv_groups
    q, k = (_key(module, name, hidden) for name in "qk")
    f = F.logsigmoid(run(module.f_proj, hidden)) / module.gate_logit_normalizer
    log_decay = as_heads(f, module.num_kv_heads)
    written = 1 - log_decay.exp()
    k, log_decay, written = (
        x.repeat_interleave(groups, 2) for x in (k, zeroed(log_decay, mask), zeroed(written, mask))
    )
    # by way of log_softmax, along which relevance can be sent
    slots = _matched(q * module.scale, k, log_decay, written).log_softmax(-1).exp()
    scan = VectorDecayHeads(slots, written, log_decay, module.head_v_dim)
    conv = getattr(module, "v_conv1d", None)
    values, inner = value_stream(
        run(module.v_proj, hidden), conv, mask, module.head_v_dim, repeat=groups
    )
    u = Chain(*inner).affine(values) if inner else values
    core = Chain(scan, Diagonal(torch.sigmoid(u), scan.shape, "activation"), *inner)
    s = core.affine(values)
    ratio = torch.sigmoid(s)
    operator = Chain(
        *masked(mask, scan.shape, values),
        frozen_rms_norm(s * ratio, module.g_norm.weight, _EPS, whole=True),
        Diagonal(ratio, scan.shape, "activation"),
        core,
    )
    # the layer reads o_proj by its weight, so an adapter around it would change nothing
    out = module.o_proj
    return LinearMixer(values, operator, lambda y: linear(y.flatten(2), out.weight, out.bias), mask)


def _key(module: Any, name: str, hidden: Tensor) -> Tensor:
    """Queries or keys (B, L, H, N)."""
    conv = getattr(module, f"{name}_conv1d", None)
    x = convolved(conv, run(getattr(module, f"{name}_proj"), hidden))
    return run(module.feature_map, torch.unflatten(x, -1, (-1, module.head_k_dim)))


def _matched(q: Tensor, k: Tensor, log_decay: Tensor, written: Tensor) -> Tensor:
    """The matches of each slot, K[t] q[t] (B, L, H, M), chunk by chunk, differentiable.

    Args:
        q: (B, L, H, N).
        k: (B, L, H, N).
        log_decay: log a (B, L, H, M).
        written: 1 - a (B, L, H, M).
    """
    tokens = q.shape[1]
    q, k, logs, s = (
        torch.unflatten(F.pad(x.transpose(1, 2), (0, 0, 0, -tokens % _TOKENS)), 2, (-1, _TOKENS))
        for x in (q, k, log_decay, written)
    )  # (B, H, C, T, N or M)
    ones = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=q.device)
    later = logs[..., None, :].expand(*logs.shape[:-1], _TOKENS, -1)  # (B, H, C, T, T, M)
    between = later.masked_fill(~ones.tril(-1)[..., None], 0).cumsum(-3)
    since, until = logs.cumsum(-2), between[..., -1, :, :].exp()
    between = between.exp().masked_fill(~ones.tril()[..., None], 0)
    found = torch.einsum("bhcij,bhcijm,bhcjm->bhcim", q @ k.mT, between, s)
    added, kept = k.mT @ (s * until), since[..., -1:, :].exp()  # (B, H, C, N, M), (B, H, C, 1, M)
    state, before = torch.zeros_like(added[:, :, 0]), []
    for chunk in range(added.shape[2]):
        before.append(state)
        state = kept[:, :, chunk] * state + added[:, :, chunk]
    found = found + since.exp() * (q @ torch.stack(before, 2))
    return found.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
