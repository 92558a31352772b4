"""Recurrences as sums over states, with one matrix per state.

A recurrence whose decay is diagonal never mixes its N states, so a channel's matrix is the sum of
one matrix per state (hidden-attention paper, eq. 16):

    alpha[m][i, j] = C[i, m] (product of state m's decays over j+1..i) B[j, m],   j <= i

Factors around the recurrence (gate, convolution, flips, padding) are the same for every state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.base import Operator
from ...operators.chain import Chain
from ...operators.combine import DirectSum, Sum
from ...operators.conv import ShortConv
from ...operators.diagonal import Diagonal
from ...operators.recurrences.scalar_decay import ScalarDecayHeads
from ...operators.recurrences.selective_scan import SelectiveScan
from ...operators.recurrences.vector_decay import VectorDecayHeads
from ...operators.reorder import Permute

#: Recurrences whose states do not mix.
Scan = SelectiveScan | ScalarDecayHeads | VectorDecayHeads


class Term(NamedTuple):
    """A product outer . scan . inner of one recurrence and other operators.

    Attributes:
        outer: the operators left of the recurrence, which act after the recurrence.
        scan: the recurrence.
        inner: the operators right of the recurrence, which act before the recurrence.
    """

    outer: tuple[Operator, ...]
    scan: Scan
    inner: tuple[Operator, ...]

    @property
    def states(self) -> int:
        """The number of states of the recurrence, N."""
        scan = self.scan
        return (scan.a if isinstance(scan, SelectiveScan) else scan.key).shape[-1]

    def one_state(self, state: int) -> Operator:
        """Return the same product with only one state of the recurrence."""
        return Chain(*self.outer, _one_state(self.scan, state), *self.inner)


def terms_of(operator: Operator) -> list[Term] | None:
    """Expand an operator into a sum of terms: one recurrence, or one for each direction.

    Return None if a summand has no recurrence, several, or one with states that mix; or if it has
    an operator that need not act on each state alike.
    """
    terms = []
    for parts in products_of(operator):
        scans = [(index, part) for index, part in enumerate(parts) if isinstance(part, Scan)]
        if len(scans) != 1:
            return None
        ((index, scan),) = scans
        outer, inner = parts[:index], parts[index + 1 :]
        if not all(isinstance(p, Diagonal | ShortConv | Permute) for p in (*outer, *inner)):
            return None
        terms.append(Term(outer, scan, inner))
    return terms


def products_of(
    operator: Operator, expands: Callable[[Operator], bool] = lambda _: True
) -> list[tuple[Operator, ...]]:
    """Expand an operator into a sum of products of elementary operators, outermost factor first.

    Only sums for which ``expands`` returns True are expanded. Default: all.
    """
    if isinstance(operator, Chain):  # (a + b) c = a c + b c: choose one summand of each factor
        choices = product(*(products_of(part, expands) for part in operator.parts))
        return [tuple(chain.from_iterable(choice)) for choice in choices]
    if isinstance(operator, Sum) and expands(operator):
        return [parts for part in operator.parts for parts in products_of(part, expands)]
    if isinstance(operator, DirectSum) and len(operator.parts) == 1:  # of all heads, so no split
        return products_of(operator.parts[0], expands)
    return [(operator,)]


def state_matrices(terms: Sequence[Term], channels: Sequence[int]) -> Tensor:
    """Return the matrix of every state for some channels, (B, len(channels), N, L, L).

    The N states of all terms are concatenated. ``channels`` are indices through all heads.
    """
    first = terms[0].scan
    batch, tokens, _, per_head = first.shape
    states = sum(term.states for term in terms)
    unit = torch.eye(per_head, dtype=first.dtype, device=first.device)
    identity = {0: unit.new_ones(1, 1, 1, 1)}  # a band with lag 0 only
    out = unit.new_empty(batch, len(channels), states, tokens, tokens)
    for matrices, channel in zip(out.unbind(1), channels, strict=True):
        head, within_head = divmod(channel, per_head)
        # entries() sums over the head's channels, and this factor is 1 for one of them, else 0
        factor = unit[within_head].view(1, 1, 1, per_head)
        operators = (term.one_state(m).select([head]) for term in terms for m in range(term.states))
        for state, operator in enumerate(operators):
            matrices[:, state] = operator.entries(factor, identity, range(tokens)).full(tokens)
    return out


def _one_state(scan: Scan, state: int) -> Scan:
    """Return the recurrence with only the state at index ``state``, to compute its matrix."""
    index = slice(state, state + 1)
    if isinstance(scan, SelectiveScan):
        return scan.changed(a=scan.a[..., index], b=scan.b[..., index], c=scan.c[..., index])
    vectors = {"query": scan.query[..., index], "key": scan.key[..., index]}
    if isinstance(scan, ScalarDecayHeads):
        return scan.changed(**vectors)
    bonus = None if scan.bonus is None else scan.bonus[:, index]
    return scan.changed(**vectors, log_decay=scan.log_decay[..., index], bonus=bonus)
