"""Linear attention gated by key channel: fla's HGRN, HGRN2, LightNet and gated slot attention.

HGRN and HGRN2: fla's HGRNAttention and HGRN2Attention.

    f = sigmoid(f_proj h), above the layer's lower bound
    HGRN     s[t] = f[t] s[t-1] + (1 - f[t]) SiLU(i_proj h)[t]        y = SiLU(g) RMSNorm(s)
    HGRN2    gated linear attention with decay f and key 1 - f        y = RMSNorm(s)

The norms are over all channels, and output = o_proj(y).  HGRN2 applies SiLU to q; f, i and q have
short convolutions if the layer has them.  Frozen: f, q, the ratio SiLU(i) / i, the norm's
statistics and the gate.

LightNet: fla's LightNetAttention.

    z[t] = log of the sum of exp(k) over tokens up to t, per key channel
    key[t] = sigmoid(k[t] - z[t-1])                       decay[t] = 1 - key[t]
    alpha_h[i, j] = SiLU(q_h[i]) . (product of decays j+1..i) key_h[j] / sqrt(N),   j <= i
    y = SiLU(g) RMSNorm(alpha v)                          output = o_proj(y)

So each key channel computes a mean of the values, weighted by exp(k).  q, k and v have short
convolutions if the layer has them; the norm is over all channels.  Frozen: q, the keys, z, the
decays, the norm's statistics and the gate.

Gated slot attention: fla's GatedSlotAttention.

    a[t] = sigmoid(f_proj h)^(1/8), one per slot
    K[t] = diag(a[t]) K[t-1] + (1 - a[t]) k[t]^T          p[t] = softmax(scale K[t] q[t])
    V[t] = diag(a[t]) V[t-1] + (1 - a[t]) v[t]^T          s[t] = p[t] . V[t]
    y = RMSNorm(SiLU(s))                                  output = o_proj(y)

The layer applies a feature map to queries and keys, SiLU to values, and before that short
convolutions with SiLU if it has them.  With p frozen, this is linear attention with a decay per
slot, queries p and keys 1 - a.  Frozen: p, a, the ratios SiLU(u) / u and the norm's statistics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import ElementwiseRecurrence, VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, projection, run, zeroed
from ..path import Path
from .common import input_and_mask, project, value_path, zeroed_input_and_mask

#: eps of the norms in HGRN2 and GSA, and in LightNet, whose code ignores the eps of norm modules.
_EPS, _LIGHTNET_EPS = 1e-5, 1e-6
#: LightNet's k at padded tokens, and z before the first token; exp(-1e4) is negligible.
_LOG_0 = -1e4
#: Number of tokens of a chunk in GSA, for which all products of decays are in memory.
_CHUNK = 16


def fla_hgrn(module: Any, call: Call) -> LinearMixer:
    """Linearize HGRNAttention: s[t] = f[t] s[t-1] + (1 - f[t]) SiLU(i)[t], also at padding."""
    hidden, mask = input_and_mask(module, call)
    decay = _log_forget(module, project(module, "f", hidden, mask=mask), call).exp()
    path = value_path(module, hidden, mask, per_head=1, name="i", silu=True)
    path.scale(1 - decay, "scan").scan(ElementwiseRecurrence(decay))
    path.rms_norm(module.g_norm.weight, module.g_norm.eps, groups=1)
    return path.gate(run(module.g_proj, hidden)).to(module.o_proj)


def fla_hgrn2(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's HGRN2Attention: linear attention with a decay per key channel."""
    hidden, mask = zeroed_input_and_mask(module, call)
    q = F.silu(project(module, "q", hidden)) * module.head_f_dim**-0.5
    log_decay = _log_forget(module, project(module, "f", hidden), call)
    q, k, log_decay = (as_heads(x, module.num_heads) for x in (q, 1 - log_decay.exp(), log_decay))
    path = value_path(module, hidden, mask, module.head_i_dim, name="i")
    path.scan(VectorDecayHeads(q, k, zeroed(log_decay, mask), module.head_i_dim))
    return _project_raw(module, path.rms_norm(module.g_norm.weight, _EPS, groups=1))


def _log_forget(module: Any, f: Tensor, call: Call) -> Tensor:
    """Return log forget gates; except in the first layer, the gates are above ``lower_bound``."""
    log_f = F.logsigmoid(f)
    bound = call.argument("lower_bound", 5)
    if bound is None or not module.layer_idx > 0:
        return log_f
    bound = bound.to(f)
    return torch.logaddexp(bound.log(), torch.log1p(-bound) + log_f)


def fla_lightnet(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's LightNetAttention: means of the values weighted by exp(k)."""
    hidden, mask = zeroed_input_and_mask(module, call)
    q, k = (as_heads(project(module, name, hidden), module.num_heads) for name in "qk")
    key, log_decay = _keys_and_log_decays(k, mask)
    scan = VectorDecayHeads(F.silu(q) * module.head_f_dim**-0.5, key, log_decay, module.head_i_dim)
    path = value_path(module, hidden, mask, module.head_i_dim).scan(scan)
    path.rms_norm(module.g_norm.weight, _LIGHTNET_EPS, groups=1)
    return _project_raw(module, path.gate(run(module.g_proj, hidden)))


def _keys_and_log_decays(k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return key[t] = sigmoid(k[t] - z[t-1]) and log(1 - key[t]) of LightNet, (B, L, H, N)."""
    if mask is not None:
        k = k.masked_fill(~mask[:, :, None, None], _LOG_0)
    z_before = F.pad(torch.logcumsumexp(k.detach(), 1)[:, :-1], (0, 0, 0, 0, 1, 0), value=_LOG_0)
    is_real = torch.ones_like(k[:, :, 0, 0], dtype=torch.long) if mask is None else mask.long()
    logit = k - z_before
    # before the first token there is no state, so its decay is 1
    return zeroed(torch.sigmoid(logit), mask), zeroed(F.logsigmoid(-logit), is_real.cumsum(1) > 1)


def fla_gsa(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's GatedSlotAttention: linear attention with queries p and keys 1 - a."""
    hidden, mask = zeroed_input_and_mask(module, call)
    groups = module.num_kv_groups
    q, k = (torch.unflatten(project(module, n, hidden), -1, (-1, module.head_k_dim)) for n in "qk")
    q, k = run(module.feature_map, q), run(module.feature_map, k)
    log_forget = F.logsigmoid(run(module.f_proj, hidden)) / module.gate_logit_normalizer
    log_decay = as_heads(log_forget, module.num_kv_heads)
    write = 1 - log_decay.exp()
    k, log_decay, write = (
        x.repeat_interleave(groups, 2) for x in (k, zeroed(log_decay, mask), zeroed(write, mask))
    )
    # computed with log_softmax, along which rules can propagate relevance
    slots = _slot_scores(q * module.scale, k, log_decay, write).log_softmax(-1).exp()
    path = value_path(module, hidden, mask, module.head_v_dim, repeat=groups).act()
    path.scan(VectorDecayHeads(slots, write, log_decay, module.head_v_dim)).act()
    return _project_raw(module, path.rms_norm(module.g_norm.weight, _EPS, groups=1))


def _slot_scores(q: Tensor, k: Tensor, log_decay: Tensor, write: Tensor) -> Tensor:
    """Return M slots' scores K[t] q[t] (B, L, H, M), differentiable, computed by chunks.

    Args:
        q: queries (B, L, H, N).
        k: keys (B, L, H, N).
        log_decay: logarithms of the decays a (B, L, H, M).
        write: the factors 1 - a (B, L, H, M).
    """
    tokens = q.shape[1]
    q, k, logs, write = (
        torch.unflatten(F.pad(x.transpose(1, 2), (0, 0, 0, -tokens % _CHUNK)), 2, (-1, _CHUNK))
        for x in (q, k, log_decay, write)
    )  # (B, H, C, T, N or M)
    ones = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device)
    later = logs[..., None, :].expand(*logs.shape[:-1], _CHUNK, -1)  # (B, H, C, T, T, M)
    # log decays of tokens j+1..i, for each pair i, j of a chunk
    between = later.masked_fill(~ones.tril(-1)[..., None], 0).cumsum(-3)
    # log decays from a chunk's start, and decays to its end
    since_start, until_end = logs.cumsum(-2), between[..., -1, :, :].exp()
    between = between.exp().masked_fill(~ones.tril()[..., None], 0)
    scores = torch.einsum("bhcij,bhcijm,bhcjm->bhcim", q @ k.mT, between, write)
    # (B, H, C, N, M), (B, H, C, 1, M)
    chunk_sums, chunk_decays = k.mT @ (write * until_end), since_start[..., -1:, :].exp()
    state, states_before = torch.zeros_like(chunk_sums[:, :, 0]), []
    for chunk in range(chunk_sums.shape[2]):
        states_before.append(state)
        state = chunk_decays[:, :, chunk] * state + chunk_sums[:, :, chunk]
    scores = scores + since_start.exp() * (q @ torch.stack(states_before, 2))
    return scores.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def _project_raw(module: Any, path: Path) -> LinearMixer:
    """Return the mixer after a projection with o_proj's raw weight, without LoRA adapters."""
    return path.silence().to(projection(module.o_proj, called=False))
