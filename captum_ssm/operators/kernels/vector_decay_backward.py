"""Linear attention with a decay for each key channel, of which autograd takes all gradients.

    S[t] = diag(decay[t]) S[t-1] + k[t] v[t]^T,   y[t] = q[t] . S[t]

The SSD form of Mamba-2 with a decay for each channel of the state: within a chunk every product of
decays between two of its tokens is formed, of the sum of their logarithms; between chunks goes a
state.

:takes: q, k and the decays' logarithms (B, L, H, N), v (B, L, H, P), and the bonus (H, N) or None.
:gives: y (B, L, H, P).
:cost: T (N + P) multiplications with additions for a token and head within chunks of T, and 2 N P
    by way of the state.
:literature: Dao and Gu, Transformers are SSMs, 2024, section 6; Yang et al., Gated Linear Attention
    Transformers with Hardware-Efficient Training, 2024, section 4.
:naive version: ``token_loops.vector_decay``
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens of a chunk: of so many all products of decays are held.
_TOKENS = 16


def vector_decay(
    query: Tensor, key: Tensor, log_decay: Tensor, values: Tensor, bonus: Tensor | None
) -> Tensor:
    """The outputs.

    Args:
        query: (B, L, H, N).
        key: (B, L, H, N).
        log_decay: (B, L, H, N), at most 0.
        values: (B, L, H, P).
        bonus: if given (H, N), a token reads the state before its own step, and of itself with
            these factors; see :class:`~captum_ssm.operators.VectorDecayHeads`.
    """
    tokens = query.shape[1]
    missing = -tokens % _TOKENS
    q, k, logs, v = (
        torch.unflatten(F.pad(x.transpose(1, 2), (0, 0, 0, missing)), 2, (-1, _TOKENS))
        for x in (query, key, log_decay, values)
    )  # (B, H, C, T, N or P)
    ones = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=q.device)
    # sums, not differences of sums: small decays would round what is left of the others
    later = logs[..., None, :].expand(*logs.shape[:-1], _TOKENS, -1)  # (B, H, C, T, T, N)
    between = later.masked_fill(~ones.tril(-1)[..., None], 0).cumsum(-3)
    until = between[..., -1, :, :].exp()
    seen, since = ones.tril(), logs.cumsum(-2)
    total, read = since[..., -1:, :], since
    if bonus is not None:
        seen, between = ones.tril(-1), F.pad(between, (0, 0, 0, 0, 1, -1))
        read = F.pad(since, (0, 0, 1, -1))
    between = between.masked_fill(~seen[..., None], float("-inf")).exp()
    inner = torch.einsum("bhcin,bhcjn,bhcijn->bhcij", q, k, between)
    if bonus is not None:
        inner = inner + torch.diag_embed((q * bonus[:, None, None] * k).sum(-1))
    written = (k * until).mT @ v  # (B, H, C, N, P)
    kept = total.exp().mT
    state, before = torch.zeros_like(written[:, :, 0]), []
    for chunk in range(written.shape[2]):
        before.append(state)
        state = kept[:, :, chunk] * state + written[:, :, chunk]
    out: Tensor = inner @ v + (q * read.exp()) @ torch.stack(before, 2)
    return out.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
