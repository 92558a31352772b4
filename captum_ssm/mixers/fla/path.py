"""PaTH attention, whose keys are reflected on their way: fla's PaTHAttention.

    P[i, j] = (I - beta[i] w[i] w[i]^T) ... (I - beta[j+1] w[j+1] w[j+1]^T)
    score[i, j] = q[i] . P[i, j] k[j] + the sum of log f over j+1..i
    alpha_h[i, j] = softmax over j <= i of score[i, j] / sqrt(N)          output = o_proj(alpha v)

with w = SiLU(conv(w_proj h)) on the unit sphere, beta = 2 sigmoid(bt_proj h), and, as options,
RMSNorms of q and k and the decays f = sigmoid(g_proj h).  A key on its way through P is a state to
which it is written, and that is erased along w: the scores are the matrices of a delta rule.
Frozen: the probabilities.  They are formed, which takes memory that grows with the square of the
tokens.

The layer takes a mask of padding only where it fills a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operators import DeltaRule
from ...operators.heads import ScoredHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, rms_norm, run
from .common import convolved, entering


def fla_path(module: Any, call: Call) -> LinearMixer:
    """fla's PaTHAttention."""
    hidden, _ = entering(module, call)
    heads, groups = module.num_kv_heads, module.num_heads // module.num_kv_heads
    q = _normed(module.maybe_q_norm, as_heads(run(module.q_proj, hidden), module.num_heads))
    k = _normed(module.maybe_k_norm, as_heads(run(module.k_proj, hidden), heads))
    w = as_heads(convolved(getattr(module, "w_conv1d", None), run(module.w_proj, hidden)), heads)
    w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)
    beta = (2 * torch.sigmoid(run(module.bt_proj, hidden)))[..., None].expand_as(w)
    values = as_heads(run(module.v_proj, hidden), heads)
    k, w, beta, values = (x.repeat_interleave(groups, 2) for x in (k, w, beta, values))
    scaling = module.head_dim**-0.5
    reads = DeltaRule(
        q * scaling,
        k,
        torch.ones_like(q[..., 0].detach()),
        None,
        module.head_dim,
        erase=w,
        erase_step=beta,
    )
    forget = None
    if module.use_forget_gate:
        forget = scaling * F.logsigmoid(run(module.g_proj, hidden))
    attention = ScoredHeads(reads, forget, module.head_dim)
    return LinearMixer(values, attention, lambda y: run(module.o_proj, y.flatten(2)))


def _normed(norm: Any, x: Tensor) -> Tensor:
    """Queries or keys (B, L, H, N) after the norm of each head, if there is one."""
    if isinstance(norm, nn.Identity):
        return x
    normed: Tensor = rms_norm(x, norm.eps) * norm.weight.to(x)
    return normed
