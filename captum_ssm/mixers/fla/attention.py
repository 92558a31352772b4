"""Softmax attention of flash-linear-attention: Attention, ForgettingAttention and PaTHAttention.

    alpha_h[i, j] = softmax over j <= i of score_h[i, j]          output = o_proj(gate alpha v)

Attention             score = rotated q[i] . k[j] / sqrt(N), in a window if the layer has one
ForgettingAttention   score = q[i] . k[j] / sqrt(N) + (the sum of log f over j+1..i)
PaTHAttention         score = (q[i] . P[i, j] k[j] + (the sum of log f over j+1..i)) / sqrt(N)

with f = sigmoid(f_proj h), in PaTH sigmoid(g_proj h), and

    P[i, j] = (I - beta[i] w[i] w[i]^T) ... (I - beta[j+1] w[j+1] w[j+1]^T)

with w = SiLU(conv(w_proj h)) on the unit sphere and beta = 2 sigmoid(bt_proj h).

Norms of q and k, the gate of ForgettingAttention, sigmoid(g_proj h), and the decays f of PaTH are
options.  ForgettingAttention uses its window only in decoding.  The layers compute probabilities in
kernels, so the adapters recompute them.  Frozen: the probabilities and the gate.

In PaTH the product P[i, j] k[j] is like a state that token j writes and later tokens erase along w,
so the scores are the matrices of a delta rule.  The adapters form whole matrices, so memory grows
with the square of the number of tokens.  PaTH uses a padding mask only to fill a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operators import DeltaRule, ScalarDecayHeads
from ...operators.heads import ScoredHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, rms_norm, run, unit_vectors, zeroed
from ..parts.softmax import seen_pairs
from ..path import Path
from .common import input_and_mask, project, rotate


def fla_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's Attention: softmax attention with rotated queries and keys.

    With padding, the window counts only real tokens, but rotations count padded tokens, too.
    """
    hidden, mask = input_and_mask(module, call)
    q = as_heads(run(module.q_proj, hidden), module.num_heads)
    k, v = (as_heads(run(p, hidden), module.num_kv_heads) for p in (module.k_proj, module.v_proj))
    if module.qk_norm:
        q, k = run(module.q_norm, q), run(module.k_norm, k)
    q, k = (rotate(module.rotary, None, x) for x in (q, k))
    k, v = (x.repeat_interleave(module.num_kv_groups, 2) for x in (k, v))
    if mask is None:
        pairs = seen_pairs(hidden.shape[1], hidden.device, window=module.window_size)
    else:
        position = mask.cumsum(1)  # counts only real tokens
        distance = position[:, :, None] - position[:, None]  # (B, L, L)
        pairs = (distance >= 0) & mask[:, :, None] & mask[:, None]
        if module.window_size is not None:
            pairs &= distance < module.window_size
        pairs = pairs[:, None]
    return Path(v).attend(q, k, module.head_dim**-0.5, pairs).to(module.o_proj)


def fla_forgetting(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's ForgettingAttention: softmax attention with decays in the scores."""
    hidden, mask = input_and_mask(module, call)
    heads, groups = module.num_heads, module.num_kv_groups
    q = _queries_or_keys(module, "q", hidden, heads) * module.head_dim**-0.5
    k = _queries_or_keys(module, "k", hidden, module.num_kv_heads).repeat_interleave(groups, 2)
    log_forget = zeroed(F.logsigmoid(run(module.f_proj, hidden)), mask)
    path = Path(run(module.v_proj, hidden), mask, module.num_kv_heads).repeat(groups).silence()
    per_head = path.shape.per_head
    # the scores q . k, as an operator without decay; the decays are added to the scores
    scores = ScalarDecayHeads(q, k, torch.zeros_like(log_forget.detach()), None, per_head)
    path.scan(ScoredHeads(scores, log_forget, per_head, mask))
    if module.use_output_gate:
        path.gate(run(module.g_proj, hidden), torch.sigmoid)
    return path.to(module.o_proj)


def fla_path(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's PaTHAttention: softmax attention with the scores of a delta rule."""
    hidden, _ = input_and_mask(module, call)
    heads, groups = module.num_kv_heads, module.num_heads // module.num_kv_heads
    q = _normalize(module.maybe_q_norm, as_heads(run(module.q_proj, hidden), module.num_heads))
    k = _normalize(module.maybe_k_norm, as_heads(run(module.k_proj, hidden), heads))
    w = unit_vectors(as_heads(project(module, "w", hidden), heads))
    beta = (2 * torch.sigmoid(run(module.bt_proj, hidden)))[..., None].expand_as(w)
    k, w, beta = (x.repeat_interleave(groups, 2) for x in (k, w, beta))
    scaling, ones = module.head_dim**-0.5, torch.ones_like(q[..., 0].detach())
    # the scores are the matrices of a delta rule that writes k with step 1 and erases along w
    scores = DeltaRule(q * scaling, k, ones, None, module.head_dim, erase=w, erase_step=beta)
    log_forget = None
    if module.use_forget_gate:
        log_forget = scaling * F.logsigmoid(run(module.g_proj, hidden))
    path = Path(run(module.v_proj, hidden), heads=heads).repeat(groups)
    return path.scan(ScoredHeads(scores, log_forget, module.head_dim)).to(module.o_proj)


def _normalize(norm: Any, x: Tensor) -> Tensor:
    """Return queries or keys (B, L, H, N) after the norm of each head, if there is one."""
    return x if isinstance(norm, nn.Identity) else rms_norm(x, norm.eps, norm.weight)


def _queries_or_keys(module: Any, name: str, hidden: Tensor, heads: int) -> Tensor:
    """Return ForgettingAttention's queries or keys (B, L, H, N), normalized if it has norms."""
    x = as_heads(run(getattr(module, f"{name}_proj"), hidden), heads)
    if not module.qk_norm:
        return x
    norm = getattr(module, f"{name}_norm")
    return rms_norm(x, norm.eps, norm.weight.view(heads, -1))
