"""Gradients of linear attention with decays, by autograd of a chunked form.

    S[t] = decay[t] S[t-1] + sum over w of k_w[t] v_w[t]^T,   y_r[t] = q_r[t] . S[t]

There is one decay per head or per channel of the state.  Each chunk is split recursively into
halves: the block from the first to the second half is a product of two thin matrices.  A state is
carried from chunk to chunk.  All factors are products of decays, never quotients or differences of
sums of logarithms.  Joining two halves has a custom backward, because autograd would copy the
halves several times.

:takes: several q and k (B, L, H, N), one v (B, L, H, P) for each k, the decays' logarithms
    (B, L, H, N) or (B, L, H, 1), the bonus (H, N) or None, and the gradients of all y.
:gives: the gradients of all q, k and v, and of the logarithms.
:cost: for a token and head T (N + P) multiplications with additions within chunks of T tokens,
    N log T for the factors, and 2 N P for the state; gradients cost twice as much again.
:literature: Dao and Gu, Transformers are SSMs, 2024, section 6; Yang et al., Gated Linear Attention
    Transformers with Hardware-Efficient Training, 2024, section 4.
:naive version: ``token_loops.vector_decay``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Number of tokens in a chunk, a power of two.
_TOKENS = 32


class Gradients(NamedTuple):
    """Gradients of every query, key and value tensor, and of the decays' logarithms."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    log_decay: Tensor


def gradients(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    log_decay: Tensor,
    values: Sequence[Tensor],
    of_outputs: Sequence[Tensor],
    bonus: Tensor | None = None,
) -> Gradients:
    """Return the gradients of queries, keys, values and log_decay in :func:`attend`.

    Args:
        queries: R query tensors, each (B, L, H, N).
        keys: W key tensors, each (B, L, H, N).
        log_decay: logarithms of the decays, at most 0, (B, L, H, N) or (B, L, H, 1).
        values: W value tensors, each (B, L, H, P).
        of_outputs: gradients of each query's outputs, each (B, L, H, P).
        bonus: factors (H, N) as in :class:`~captum_ssm.operators.VectorDecayHeads`, for one query
            and one key; a query then reads the state before its own token is added. Default: None.
    """
    with torch.enable_grad():
        q, k, v = (torch.stack(tuple(x), 2).detach() for x in (queries, keys, values))
        leaves = [x.requires_grad_() for x in (q, k, v, log_decay.detach())]
        out = attend(q, k, v, leaves[3], bonus)
        # with a bonus, a single token's output does not depend on its decay: its gradient is zero
        up = torch.stack(tuple(of_outputs), 2)
        of_leaves = torch.autograd.grad(out, leaves, up, materialize_grads=True)
    of_queries, of_keys, of_values = (list(x.unbind(2)) for x in of_leaves[:3])
    return Gradients(of_queries, of_keys, of_values, of_leaves[3])


def attend(
    query: Tensor, key: Tensor, values: Tensor, log_decay: Tensor, bonus: Tensor | None = None
) -> Tensor:
    """Return the outputs (B, L, R, H, P) of attention with decays, differentiable by autograd.

    Args:
        query: R queries per token (B, L, R, H, N).
        key: W keys per token (B, L, W, H, N).
        values: W values per token (B, L, W, H, P).
        log_decay, bonus: as in :func:`gradients`.
    """
    tokens, rows = query.shape[1:3]
    length = min(_TOKENS, 1 << (tokens - 1).bit_length())

    def cut(x: Tensor) -> Tensor:
        """Split ``x``, such as (B, L, R, H, N), into chunks (B, H, C, T, R, N)."""
        x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -tokens % length))
        return torch.unflatten(x, 1, (-1, length)).permute(0, 4, 1, 2, 3, 5).contiguous()

    decay = log_decay.exp()
    decay = F.hardshrink(decay, _tiny(decay))  # tiny decays become zero
    q, k, v, decay = map(cut, (query, key, values, decay[:, :, None]))
    own_keys = k if bonus is None else bonus[:, None, None, None] * k
    diagonal = (q[..., :, None, :] * own_keys[..., None, :, :]).sum(-1)  # (B, H, C, T, R, W)
    within, reads, writes, total = _join_runs(decay, q, k, diagonal, before_own=bonus is not None)
    v = v.flatten(3, 4)  # (B, H, C, T W, P)
    terms, carries = writes.mT @ v, total.mT  # (B, H, C, N, P), (B, H, C, N or 1, 1)
    state, states = torch.zeros_like(terms[:, :, 0]), []
    for carry, term in zip(carries.unbind(2), terms.unbind(2), strict=True):
        states.append(state)
        state = torch.addcmul(term, carry, state)
    out = within @ v + reads @ torch.stack(states, 2)  # (B, H, C, T R, P)
    out = torch.unflatten(out, 3, (length, rows)).flatten(2, 3)
    return out[:, :, :tokens].permute(0, 2, 3, 1, 4)


def _join_runs(
    decay: Tensor, query: Tensor, key: Tensor, diagonal: Tensor, before_own: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the matrix M of each run of T tokens, and the run's decayed queries and keys.

    For j < i, M[i, j] = query[i] . (product of decay[t] over j < t <= i, or over j < t < i if
    ``before_own``) key[j].  Each token has R queries and W keys.  T is a power of two.  Runs of 1,
    2, 4, ... tokens are joined in pairs: dimension -3 is first the tokens, then the runs, whose
    number halves each round until one run is left.

    Args:
        decay: decays of each token (..., T, 1, N or 1), at most 1.
        query: queries (..., T, R, N).
        key: keys (..., T, W, N).
        diagonal: entries of the matrices' diagonal (..., T, R, W).
        before_own: whether a query reads the state before its own token's decay and addition.

    Returns:
        M (..., T R, T W); reads, the queries times all decays from the run's start (..., T R, N);
        writes, the keys times all later decays (..., T W, N); and the products of all decays
        (..., 1, N or 1).
    """
    # each token is a run
    within = diagonal
    reads = query if before_own else query * decay
    writes, total = key, decay
    while total.shape[-3] > 1:
        first_block, second_block = _halves(within)
        second_reads_first, reads, writes, total = _JoinNeighbors.apply(  # type: ignore[no-untyped-call]
            reads, writes, total
        )
        # the first run does not read the second, which is later
        upper_rows = torch.cat([first_block, torch.zeros_like(first_block)], -1)
        within = torch.cat([upper_rows, torch.cat([second_reads_first, second_block], -1)], -2)
    return within.squeeze(-3), reads.squeeze(-3), writes.squeeze(-3), total.squeeze(-3)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split runs (..., runs, rows, columns) in pairs; return the first runs and the second runs."""
    first, second = torch.unflatten(x, -3, (-1, 2)).unbind(-3)
    return first, second


class _JoinNeighbors(torch.autograd.Function):
    """Autograd function for one step of :func:`_join_runs`, which joins neighboring runs in pairs.

    For each pair of runs 0 and 1 it returns reads1 writes0^T (..., runs / 2, rows, columns), then
    the joined run's reads [reads0, total0 reads1], writes [total1 writes0, writes1] and total
    total0 total1.  If decays are tiny, results and gradients below :func:`_tiny` are set to zero.
    """

    @staticmethod
    def forward(ctx: Any, reads: Tensor, writes: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(reads, writes, total)
        ctx.fades = total.is_cpu and bool(total.amin() < math.sqrt(_tiny(total)))  # see _tiny
        (reads0, reads1), (writes0, writes1) = _halves(reads), _halves(writes)
        total0, total1 = _halves(total)
        return (
            _products(reads1, writes0),
            torch.cat([reads0, _scaled(reads1, total0, ctx.fades)], -2),
            torch.cat([_scaled(writes0, total1, ctx.fades), writes1], -2),
            _scaled(total0, total1, ctx.fades),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        of_block, of_reads, of_writes, up = grads  # up: of the joined run's total
        (_, reads1), (writes0, _), (total0, total1) = map(_halves, ctx.saved_tensors)
        # of_first_reads are also the gradients of reads0, and of_second_writes of writes1
        of_first_reads, of_second_reads = of_reads.chunk(2, -2)
        of_first_writes, of_second_writes = of_writes.chunk(2, -2)
        of_total0 = (of_second_reads * reads1).sum_to_size(total0.shape).addcmul_(up, total1)
        of_total1 = (of_first_writes * writes0).sum_to_size(total1.shape).addcmul_(up, total0)
        of_reads1 = _scaled(of_second_reads, total0, ctx.fades).add_(of_block @ writes0)
        of_writes0 = _scaled(of_first_writes, total1, ctx.fades).add_(of_block.mT @ reads1)
        pairs = (of_first_reads, of_reads1), (of_writes0, of_second_writes), (of_total0, of_total1)
        return tuple(torch.stack(pair, -3).flatten(-4, -3) for pair in pairs)


def _tiny(x: Tensor) -> float:
    """Return the magnitude below which :func:`_scaled` returns zero, 8e-25 in float32.

    Products of smaller factors can be denormal, and CPUs are slow with denormal numbers.
    """
    kind = torch.finfo(x.dtype)
    return kind.tiny / kind.eps**2


def _scaled(x: Tensor, factor: Tensor, fades: bool) -> Tensor:
    """Return x * factor; with ``fades``, set entries below :func:`_tiny` to zero."""
    out = x * factor
    return F.hardshrink(out, _tiny(x)) if fades else out


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows @ columns.mT; a sum is faster for results of one or two entries."""
    if rows.shape[-2] * columns.shape[-2] <= 2:
        return (rows[..., :, None, :] * columns[..., None, :, :]).sum(-1)
    return rows @ columns.mT
