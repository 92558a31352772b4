"""Queries, keys and histories of selective scans (hidden-attention paper, eqs. 17-20).

    alpha[m][i, j] = Q[i, m] H[m][i, j] K[j, m]
    Q[i] = S_C(x[i]),   K[j] = dt[j] S_B(x[j]),   H[m][i, j] = exp(A[m] sum of dt over j+1..i)

with the step dt = softplus(S_Delta(x)).  The paper's simplification uses dt = relu(S_Delta(x)):
a token with S_Delta <= 0 then neither writes to the state nor makes it decay.

Operators store only dt, so S_Delta is computed by inverting softplus.  A step that the model
clamped to a limit (time_step_limit) counts as if softplus had returned the limit.  Other diagonal
factors are multiplied in: factors after the scan, such as 1/2 for each direction of Vision Mamba,
into the query; factors before the scan, such as the padding mask, into the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.base import Operator
from ...operators.conv import ShortConv
from ...operators.kernels.arithmetic import Map, doubled, exponential_
from ...operators.kernels.portions import vectors_of_heads
from ...operators.recurrences.scalar_decay import ScalarDecayHeads
from ...operators.recurrences.selective_scan import SelectiveScan
from ...operators.reorder import Permute
from .states import Term


class Factors(NamedTuple):
    """Factors of the matrices of all N states, for C channels.

    Attributes:
        query: Q (B, L, C, N), the weight with which token i reads a state.
        key: K (B, L, C, N), the weight with which token j writes to the state.
        history: H (B, C, N, L, L), the fraction of token j's write that is left at token i; 0 if
            the scan reads j after i.
    """

    query: Tensor
    key: Tensor
    history: Tensor

    def states(self) -> Tensor:
        """Multiply the factors to one matrix per channel and state, (B, C, N, L, L)."""
        rows, columns = (x.permute(0, 2, 3, 1) for x in (self.query, self.key))  # (B, C, N, L)
        return rows[..., :, None] * self.history * columns[..., None, :]

    def to(self, device: torch.device) -> Factors:
        """Move the factors to another device."""
        return Factors(*(x.to(device) for x in self))


def selection_factors(
    terms: Sequence[Term], channels: Sequence[int], simplified: bool
) -> Factors | None:
    """Return the factors of some channels, with the states of all terms concatenated.

    Args:
        terms: the terms of an operator, one per recurrence.
        channels: channel indices, counted through all heads.
        simplified: whether relu replaces softplus.

    Returns:
        The factors; None if a term is not a selective scan, or contains a convolution.
    """
    found = []
    for term in terms:
        selected = _selected(term)
        if selected is None:
            return None
        found.append(_factors(term, selected, channels, simplified))
    if len(found) == 1:  # histories are large: no copy
        return found[0]
    queries, keys, histories = zip(*found, strict=True)
    return Factors(torch.cat(queries, -1), torch.cat(keys, -1), torch.cat(histories, 2))


class _Selected(NamedTuple):
    """A scan's step dt (B, L, H), rate (H, N or 1), and key and query (B, L, [groups,] N)."""

    step: Tensor
    rate: Tensor
    key: Tensor
    query: Tensor


def _selected(term: Term) -> _Selected | None:
    """Return the parameters of a selective scan; None for other terms and with convolutions."""
    if any(isinstance(p, ShortConv) and p.mixes_tokens for p in (*term.outer, *term.inner)):
        return None
    scan = term.scan
    if isinstance(scan, SelectiveScan):
        return _Selected(scan.dt, scan.a, scan.b, scan.c)
    if isinstance(scan, ScalarDecayHeads) and scan.rate is not None and scan.scale is not None:
        return _Selected(scan.scale, scan.rate[:, None], scan.key, scan.query)
    return None


def _factors(term: Term, selected: _Selected, channels: Sequence[int], simplified: bool) -> Factors:
    """Return the factors of one term for some channels, as in :func:`selection_factors`."""
    per_head = term.scan.shape.per_head
    heads, within = [c // per_head for c in channels], [c % per_head for c in channels]
    step = selected.step[:, :, heads]  # (B, L, C)
    if simplified:
        step = _before_softplus(step).relu()
    chosen = torch.tensor(heads)
    query, key = (
        vectors_of_heads(x, term.scan.shape.heads, chosen).expand(-1, -1, len(heads), -1)
        for x in (selected.query, selected.key)
    )  # (B, L, C, N)
    key = key * step[..., None]
    history = _history(step, selected.rate[heads]).expand(-1, -1, query.shape[-1], -1, -1)

    outer, inner = ([p.select(heads) for p in parts] for parts in (term.outer, term.inner))
    outer.reverse()  # from the scan outwards, as inner is
    for part in outer:
        history = part.rows_of(history) if isinstance(part, Permute) else history
    for part in inner:
        history = part.columns_of(history) if isinstance(part, Permute) else history
    return Factors(
        _carried(query, [(part, part.apply) for part in outer], per_head, within),
        _carried(key, [(part, part.transpose) for part in inner], per_head, within),
        history,
    )


def _before_softplus(step: Tensor) -> Tensor:
    """Return S_Delta = log(exp(dt) - 1) without overflow; minus infinity for dt = 0."""
    return step + torch.log(-torch.expm1(-step))


def _history(step: Tensor, rate: Tensor) -> Tensor:
    """Return exp(A sum of dt over j+1..i) for j <= i, and 0 for j > i, (B, C, N, L, L).

    Sums are differences of cumulative sums, in float64 to avoid cancellation. No exponent is
    positive.

    Args:
        step: dt (B, L, C).
        rate: A (C, N).
    """
    clock = doubled(step.transpose(1, 2)).cumsum(-1)  # (B, C, L)
    elapsed = (clock[..., :, None] - clock[..., None, :]).clamp_min_(0).to(step)
    return exponential_(rate[:, :, None, None] * elapsed[:, :, None]).tril_()


def _carried(
    x: Tensor, moves: Sequence[tuple[Operator, Map]], per_head: int, within: Sequence[int]
) -> Tensor:
    """Apply diagonal operators and reorderings of tokens to a query or key (B, L, C, N).

    Args:
        x: the query or key.
        moves: pairs of an operator and its forward or adjoint function, from the scan outwards.
        per_head: value channels per head, P.
        within: the index of each of the C channels within its head.
    """
    weight = x.new_ones(*x.shape[:3], per_head)
    for operator, move in moves:
        weight = move(weight)
        x = move(x) if isinstance(operator, Permute) else x
    return x * weight[:, :, range(len(within)), within, None]
