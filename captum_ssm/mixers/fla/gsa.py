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

from ...operators import VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, projection, run, zeroed
from .common import entering_unpadded, projected, value_path

#: The norm runs as a function that does not get the module's eps.
_EPS = 1e-5
#: Tokens of a chunk: of so many all products of decays are held.
_TOKENS = 16


def fla_gsa(module: Any, call: Call) -> LinearMixer:
    """fla's GatedSlotAttention."""
    hidden, mask = entering_unpadded(module, call)
    groups = module.num_kv_groups
    q, k = (
        torch.unflatten(projected(module, n, hidden), -1, (-1, module.head_k_dim)) for n in "qk"
    )
    q, k = run(module.feature_map, q), run(module.feature_map, k)
    f = F.logsigmoid(run(module.f_proj, hidden)) / module.gate_logit_normalizer
    log_decay = as_heads(f, module.num_kv_heads)
    written = 1 - log_decay.exp()
    k, log_decay, written = (
        x.repeat_interleave(groups, 2) for x in (k, zeroed(log_decay, mask), zeroed(written, mask))
    )
    # by way of log_softmax, along which relevance can be sent
    slots = _matched(q * module.scale, k, log_decay, written).log_softmax(-1).exp()
    path = value_path(module, hidden, mask, module.head_v_dim, repeat=groups).act()
    path.scan(VectorDecayHeads(slots, written, log_decay, module.head_v_dim)).act()
    path.rms_norm(module.g_norm.weight, _EPS, groups=1)
    # the layer reads o_proj by its weight, so an adapter around it would change nothing
    return path.silence().to(projection(module.o_proj, called=False))


def _matched(q: Tensor, k: Tensor, log_decay: Tensor, written: Tensor) -> Tensor:
    """Return the matches of each slot, K[t] q[t] (B, L, H, M), chunk by chunk, differentiable.

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
