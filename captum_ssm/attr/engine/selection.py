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

    Return None if a term is not a selective scan, or contains a convolution. ``channels`` are
    indices through all heads. With ``simplified``, relu replaces softplus.
    """
    by_term = []
    for term in terms:
        parameters = _selection_parameters(term)
        if parameters is None:
            return None
        by_term.append(_factors(term, parameters, channels, simplified))
    if len(by_term) == 1:  # histories are large: no copy
        return by_term[0]
    queries, keys, histories = zip(*by_term, strict=True)
    return Factors(torch.cat(queries, -1), torch.cat(keys, -1), torch.cat(histories, 2))


class _Parameters(NamedTuple):
    """A scan's step dt (B, L, H), rate A (H, N or 1), and key and query (B, L, [groups,] N)."""

    step: Tensor
    rate: Tensor
    key: Tensor
    query: Tensor


def _selection_parameters(term: Term) -> _Parameters | None:
    """Return step, rate, key and query of a Mamba-1 or Mamba-2 scan.

    Return None if the decay is not exp(dt A), or beside a convolution, which adds neighboring
    tokens and so turns the product of query, history and key into a sum.
    """
    if any(isinstance(p, ShortConv) and p.mixes_tokens for p in (*term.outer, *term.inner)):
        return None
    scan = term.scan
    if isinstance(scan, SelectiveScan):
        return _Parameters(scan.dt, scan.a, scan.b, scan.c)
    if isinstance(scan, ScalarDecayHeads) and scan.rate is not None and scan.scale is not None:
        return _Parameters(scan.scale, scan.rate[:, None], scan.key, scan.query)
    return None


def _factors(
    term: Term, parameters: _Parameters, channels: Sequence[int], simplified: bool
) -> Factors:
    """Return the factors of one term for some channels, as in :func:`selection_factors`."""
    per_head = term.scan.shape.per_head
    heads, within_head = [c // per_head for c in channels], [c % per_head for c in channels]
    step = parameters.step[:, :, heads]  # (B, L, C); from here each channel is a head
    if simplified:
        step = _before_softplus(step).relu()
    head_indices = torch.tensor(heads)
    query, key = (
        vectors_of_heads(x, term.scan.shape.heads, head_indices).expand(-1, -1, len(heads), -1)
        for x in (parameters.query, parameters.key)
    )  # (B, L, C, N)
    key = key * step[..., None]
    history = _history(step, parameters.rate[heads]).expand(-1, -1, query.shape[-1], -1, -1)

    outer, inner = ([p.select(heads) for p in parts] for parts in (term.outer, term.inner))
    outer.reverse()  # from the scan outwards, as inner is
    # the scan may read tokens in another order: move rows and columns to the order of tokens
    for part in outer:
        history = part.rows_of(history) if isinstance(part, Permute) else history
    for part in inner:
        history = part.columns_of(history) if isinstance(part, Permute) else history
    return Factors(
        _apply_moves(query, [(part, part.apply) for part in outer], per_head, within_head),
        _apply_moves(key, [(part, part.transpose) for part in inner], per_head, within_head),
        history,
    )


def _before_softplus(step: Tensor) -> Tensor:
    """Return S_Delta = log(exp(dt) - 1) without overflow; minus infinity for dt = 0."""
    return step + torch.log(-torch.expm1(-step))


def _history(step: Tensor, rate: Tensor) -> Tensor:
    """Return exp(A sum of dt over j+1..i) for j <= i, and 0 for j > i, (B, C, N, L, L).

    ``step`` is dt (B, L, C), and ``rate`` is A (C, N). Sums are differences of cumulative sums, in
    float64 to avoid cancellation. No exponent is positive.
    """
    clock = doubled(step.transpose(1, 2)).cumsum(-1)  # (B, C, L)
    elapsed = (clock[..., :, None] - clock[..., None, :]).clamp_min_(0).to(step)
    return exponential_(rate[:, :, None, None] * elapsed[:, :, None]).tril_()


def _apply_moves(
    x: Tensor, moves: Sequence[tuple[Operator, Map]], per_head: int, within_head: Sequence[int]
) -> Tensor:
    """Apply diagonal operators and reorderings of tokens to a query or key (B, L, C, N).

    Operators act on the P channels of each head, so their product is computed for ones, and only
    the wanted channel of each head multiplies ``x``. ``moves`` are pairs of an operator and
    its forward or adjoint function, from the scan outwards. ``within_head`` has the index of each
    of the C channels within its head.
    """
    factor = x.new_ones(*x.shape[:3], per_head)
    for operator, move in moves:
        factor = move(factor)
        x = move(x) if isinstance(operator, Permute) else x
    return x * factor[:, :, range(len(within_head)), within_head, None]
