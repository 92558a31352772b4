"""Gradients of linear attention with decays, by autograd of a chunked form.

    S[t] = decay[t] S[t-1] + sum over w of k_w[t] v_w[t]^T,   y_r[t] = q_r[t] . S[t]

The decay is one per head or one per channel of the state.  A chunk is halved again and again: the
second half reads the first through a product of two thin factors.  A state goes between chunks.
All factors are products of decays, never quotients or differences of sums of logarithms.

:takes: several q and k (B, L, H, N), as many v (B, L, H, P) as k, the decays' logarithms
    (B, L, H, N) or (B, L, H, 1), the bonus (H, N) or None, and the gradients of all y.
:gives: the gradients of all q, k and v, and of the logarithms.
:cost: T (N + P) multiplications with additions for a token and head within chunks of T, N log T for
    the factors, and 2 N P by way of the state; for gradients twice as many again.
:literature: Dao and Gu, Transformers are SSMs, 2024, section 6; Yang et al., Gated Linear Attention
    Transformers with Hardware-Efficient Training, 2024, section 4.
:naive version: ``token_loops.vector_decay``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens of a chunk, a power of two.
_TOKENS = 32


class Gradients(NamedTuple):
    """Those of each query, key and value, and of the decays' logarithms."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    log_decay: Tensor


def gradients(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    log_decay: Tensor,
    values: Sequence[Tensor],
    outer: Sequence[Tensor],
    bonus: Tensor | None = None,
) -> Gradients:
    """The gradients of everything that attention with decays is given.

    Args:
        queries: R, each (B, L, H, N).
        keys: W, each (B, L, H, N).
        log_decay: at most 0, (B, L, H, N) or (B, L, H, 1).
        values: as many as keys, each (B, L, H, P).
        outer: the gradient of each query's outputs (B, L, H, P).
        bonus: of one query and key: if given (H, N), a token reads the state before its own step,
            and of itself with these factors; see :class:`~captum_ssm.operators.VectorDecayHeads`.
            Default: None.
    """
    with torch.enable_grad():
        q, k, v = (torch.stack(tuple(x), 2).detach() for x in (queries, keys, values))
        leaves = [x.requires_grad_() for x in (q, k, v, log_decay.detach())]
        out = attend(q, k, v, leaves[3], bonus)
        found = torch.autograd.grad(out, leaves, torch.stack(tuple(outer), 2))
    of_queries, of_keys, of_values = (list(x.unbind(2)) for x in found[:3])
    return Gradients(of_queries, of_keys, of_values, found[3])


def attend(
    query: Tensor, key: Tensor, values: Tensor, log_decay: Tensor, bonus: Tensor | None = None
) -> Tensor:
    """The outputs (B, L, R, H, P) of attention with decays, of which autograd takes gradients.

    Args:
        query: (B, L, R, H, N).
        key: (B, L, W, H, N).
        values: (B, L, W, H, P).
        log_decay, bonus: as in :func:`gradients`.
    """
    tokens, rows = query.shape[1:3]
    length = min(_TOKENS, 1 << (tokens - 1).bit_length())

    def cut(x: Tensor) -> Tensor:
        """(B, H, C, R or W, T, N or P)."""
        x = F.pad(x.permute(0, 3, 2, 1, 4), (0, 0, 0, -tokens % length))
        return torch.unflatten(x, 3, (-1, length)).transpose(2, 3)

    q, k, v, decay = map(cut, (query, key, values, normal(log_decay.exp())[:, :, None]))
    aside = k if bonus is None else bonus[:, None, None, None] * k
    own = torch.einsum("bhcrtn,bhcwtn->bhctrw", q, aside)
    inner, reads, writes, total = _by_halves(decay, q, k, own, late=bonus is not None)
    v = v.flatten(3, 4)
    written, kept = writes.mT @ v, total.mT  # (B, H, C, N, P), (B, H, C, N or 1, 1)
    state, before = torch.zeros_like(written[:, :, 0]), []
    for keeps, adds in zip(kept.unbind(2), written.unbind(2), strict=True):
        before.append(state)
        state = normal(keeps * state) + adds
    out = inner @ v + reads @ torch.stack(before, 2)  # (B, H, C, R T, P)
    out = torch.unflatten(out, 3, (rows, length)).transpose(2, 3).flatten(3, 4)
    return out[:, :, :, :tokens].permute(0, 3, 2, 1, 4)


def _by_halves(
    decay: Tensor, query: Tensor, key: Tensor, own: Tensor, late: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The matrices of runs of T tokens, T a power of two, and what these read, write and keep.

    Args:
        decay: (..., 1, T, N or 1), at most 1.
        query: (..., R, T, N).
        key: (..., W, T, N).
        own: what each token takes of its own values (..., T, R, W).
        late: whether a token reads the state before its own step.

    Returns:
        The matrices (..., R T, W T); queries with all decays from the first token on that they
        see (..., R T, N), keys with all decays after theirs (..., W T, N), and the products of all
        decays (..., 1, N or 1).
    """
    inner = own[..., :, None, :, None]  # (..., runs, R, tokens, W, tokens)
    read = query if late else normal(query * decay)
    reads, writes, total = (x.transpose(-3, -2)[..., None, :] for x in (read, key, decay))
    while reads.shape[-4] > 1:  # (..., runs, R, tokens, N)
        split = (torch.unflatten(x, -4, (-1, 2)).unbind(-4) for x in (reads, writes, total))
        (reads0, reads1), (writes0, writes1), (total0, total1) = split
        inner0, inner1 = torch.unflatten(inner, -5, (-1, 2)).unbind(-5)
        across = _products(reads1, writes0).view_as(inner0)
        above = torch.cat([inner0, torch.zeros_like(inner0)], -1)
        inner = torch.cat([above, torch.cat([across, inner1], -1)], -3)
        reads = torch.cat([reads0, normal(reads1 * total0)], -2)
        writes = torch.cat([normal(writes0 * total1), writes1], -2)
        total = normal(total0 * total1)
    inner = inner.squeeze(-5).flatten(-2).flatten(-3, -2)
    reads, writes = (x.squeeze(-4).flatten(-3, -2) for x in (reads, writes))
    return inner, reads, writes, total.squeeze(-4).squeeze(-3)


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """Of all rows with all columns; libraries are slow at many matrices of one entry."""
    rows, columns = rows.flatten(-3, -2), columns.flatten(-3, -2)
    if rows.shape[-2] * columns.shape[-2] == 1:
        return (rows * columns).sum(-1, keepdim=True)
    return rows @ columns.mT


class _Normal(torch.autograd.Function):
    """Zeros in place of denormal numbers, in values and in gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.hardshrink(x, torch.finfo(x.dtype).tiny)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return F.hardshrink(grads[0], torch.finfo(grads[0].dtype).tiny)


def normal(x: Tensor) -> Tensor:
    """The same with zeros in place of denormal numbers, with which processors are slow."""
    found: Tensor = _Normal.apply(x)  # type: ignore[no-untyped-call]
    return found
