"""The states of recurrences as memories: how much of each token remains, and which tokens erase it.

    S[t] = sum over j <= t of K[t, j] v[j]^T,      K[t, j] = T[t] ... T[j + 1] k[j]

The matrix T[t] maps one state to the next.  It is diagonal for decays, diag(decay) - taken erase^T
for delta rules, and the cell's matrix for recurrences with feedback.  The term K[t, j] v[j]^T is
the *share* of token j in the state.  Computing the shares of all j for one t, or the share of one j
for all t, takes time linear in the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.base import Operator
from ...operators.chain import Chain
from ...operators.combine import Composite, DirectSum
from ...operators.heads import DenseHeads
from ...operators.kernels.portions import vectors_of_heads
from ...operators.recurrences.delta_rule import DeltaRule
from ...operators.recurrences.elementwise import ElementwiseRecurrence
from ...operators.recurrences.feedback import FeedbackRecurrence
from ...operators.recurrences.scalar_decay import ScalarDecayHeads
from ...operators.recurrences.selective_scan import SelectiveScan
from ...operators.recurrences.vector_decay import VectorDecayHeads
from ...operators.reorder import Permute
from .cache import Cache, is_causal
from .states import products_of

#: Recurrences that have a state.
Stateful = (
    SelectiveScan
    | ScalarDecayHeads
    | VectorDecayHeads
    | DeltaRule
    | ElementwiseRecurrence
    | FeedbackRecurrence
)

#: The logarithm of a decay that resets the state to 0.
_RESET = -1e4


class Memory(NamedTuple):
    """A recurrence as a memory: step t adds key[t] value[t]^T to the decayed state.

    The dimension L counts *steps*, tokens in the order in which the recurrence reads them.

    Attributes:
        key: the key vectors k (B, L, H, N).
        value: the value vectors v (B, L, H, P).
        log_decay: logarithm of the decay of each step (B, L, H, 1 or N), at most 0.
        order: the token that each step reads (L,), on the CPU.
        erasure: the vectors ``erase`` and ``taken`` (B, L, H, N) of a delta rule, as in
            :class:`.Correction`. Default: None, no delta rule.
        feedback: the recurrence, if its previous output enters the state. Default: None.
    """

    key: Tensor
    value: Tensor
    log_decay: Tensor
    order: Tensor
    erasure: tuple[Tensor, Tensor] | None = None
    feedback: FeedbackRecurrence | None = None

    @property
    def fades(self) -> bool:
        """Return True if T is diagonal, so that each element of the state decays separately."""
        return self.erasure is None and self.feedback is None

    @property
    def width(self) -> int:
        """The number of stored values per token and value channel, N."""
        return self.key.shape[-1]

    def step_of(self, token: int) -> int:
        """Return the index of the step that reads ``token``."""
        return int((self.order == token).nonzero()[0, 0])

    def kept(self, token: int) -> Tensor:
        """Return the decayed keys K[token, j] of all tokens j, (B, L, H, N); 0 for later tokens."""
        step = self.step_of(token)
        found = torch.zeros_like(self.key)
        found[:, : step + 1] = self._kept_by_decay(step) if self.fades else self._kept_by_step(step)
        return found[:, self.order.argsort()]

    def states(self, tokens: Sequence[int]) -> Tensor:
        """Return the state after each of T tokens, (B, T, H, N, P), in one pass over the steps."""
        batch, _, heads, width = self.key.shape
        state = self.key.new_zeros(batch, heads, width, self.value.shape[-1])
        found, start = {}, 0
        for step in sorted(map(self.step_of, tokens)):
            steps = slice(start, step + 1)
            if step >= start:
                run = self._run_by_decay if self.fades else self._run_by_step
                state = run(state, steps)
            found[step], start = state, step + 1
        return torch.stack([found[self.step_of(token)] for token in tokens], 1)

    def sizes(self, token: int) -> Tensor:
        """Return the norm (B, H, L) of each token's share in the state after ``token``."""
        value = self.value[:, self.order.argsort()]
        found: Tensor = self.kept(token).norm(dim=-1) * value.norm(dim=-1)
        return found.transpose(1, 2)

    def erased(self, source: int, token: int) -> Tensor:
        """Return the loss of the source's share at each token up to ``token``, (B, H, L).

        If T is diagonal, the loss is summed over the key's elements and divided among the tokens
        in between, in proportion to the logarithms of their decays.  Otherwise the loss at a step
        is the decrease of the component along the original share, which may be negative.
        """
        first, last = self.step_of(source), self.step_of(token)
        found = self.key.new_zeros(*self.key.shape[:3]).transpose(1, 2)  # (B, H, L)
        if last > first:
            size = self.value[:, first].norm(dim=-1)  # (B, H)
            erased = self._erased_by_decay if self.fades else self._erased_by_step
            found[..., first + 1 : last + 1] = erased(first, last) * size[..., None]
        return found[..., self.order.argsort()]

    def without(self, source: int, token: int) -> Tensor:
        """Return the norm of the source's share if one token's step had not changed the state.

        The result (B, H, L) has one entry per omitted token. Only steps after ``source`` up to
        ``token`` change the norm.
        """
        first, last = self.step_of(source), self.step_of(token)
        if last < first:
            return self.key.new_zeros(*self.key.shape[:3]).transpose(1, 2)
        between = range(first + 1, last + 1)
        skip = self._skip_by_decay if self.fades else self._skip_by_step
        each, whole = skip(first, between)
        found: Tensor = whole.norm(dim=-1)[..., None].repeat(1, 1, self.key.shape[1])  # (B, H, L)
        if between:
            found[..., between.start : between.stop] = each.norm(dim=-1)
        found *= self.value[:, first].norm(dim=-1)[..., None]
        return found[..., self.order.argsort()]

    def half_lives(self) -> Tensor:
        """Return the half-life of a share in tokens, from the mean log decay (B, H, 1 or N).

        Steps that reset the state to 0 are left out of the mean.
        """
        counted = self.log_decay > _RESET
        total = self.log_decay.where(counted, 0).sum(1)
        mean = total / counted.sum(1).clamp_min(1)
        return math.log(2) / -mean.clamp_max(-torch.finfo(mean.dtype).tiny)

    # --- T diagonal: sums of logarithms ------------------------------------------------------

    def _kept_by_decay(self, step: int) -> Tensor:
        """Return the decayed keys K[step, j] for j = 0 to ``step``, if T is diagonal."""
        return _sums_after(self.log_decay[:, : step + 1]).exp() * self.key[:, : step + 1]

    def _run_by_decay(self, state: Tensor, steps: slice) -> Tensor:
        """Run some steps from a state (B, H, N, P), and return the new state, if T is diagonal."""
        logs = self.log_decay[:, steps]
        written = _sums_after(logs).exp() * self.key[:, steps]
        faded = logs.sum(1).exp()[..., None] * state
        return torch.einsum("bjhn,bjhp->bhnp", written, self.value[:, steps]).add_(faded)

    def _skip_by_decay(self, first: int, between: range) -> tuple[Tensor, Tensor]:
        """Return the key of step ``first``, decayed by all of S steps but one, and by all steps."""
        logs = self.log_decay[:, between.start : between.stop]
        before = logs.cumsum(1).roll(1, 1)  # a difference of sums would cancel a reset
        before[:, :1] = 0
        each = (before + _sums_after(logs)).exp() * self.key[:, first, None]
        return each.transpose(1, 2), logs.sum(1).exp() * self.key[:, first]

    def _erased_by_decay(self, first: int, last: int) -> Tensor:
        """Return the loss of the key of step ``first`` at each later step up to ``last``."""
        logs = self.log_decay[:, first + 1 : last + 1].clamp_min(_RESET)
        total = logs.sum(1, keepdim=True)
        share = torch.where(total < 0, logs / torch.where(total < 0, total, -1.0), 0.0)
        gone = -torch.expm1(total) * self.key[:, first : first + 1].abs()
        return (share * gone).sum(-1).transpose(1, 2)

    # --- the same if T is not diagonal: one step at a time -----------------------------------

    def _kept_by_step(self, step: int) -> Tensor:
        products = self._products(step)
        found = [torch.einsum("bhmn,bhn->bhm", product, self.key[:, j]) for j, product in products]
        return torch.stack(found[::-1], 1)

    def _products(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each j from ``step`` down to 0, with the product T[step] ... T[j + 1]."""
        width = self.key.shape[-1]
        unit = torch.eye(width, dtype=self.key.dtype, device=self.key.device)
        unit = unit.expand(*self.key.shape[:1], self.key.shape[2], width, width)
        product = unit
        for j in range(step, -1, -1):
            yield j, product
            if self.feedback is not None:
                product = product @ self.feedback.step(unit, j)
            else:  # T[j] = diag(decay) - taken erase^T
                assert self.erasure is not None
                erase, taken = (x[:, j] for x in self.erasure)
                column = torch.einsum("bhmn,bhn->bhm", product, taken)
                faded = product * self.log_decay[:, j].exp()[..., None, :]
                product = faded - column[..., None] * erase[:, :, None]

    def _step(self, state: Tensor, step: int) -> Tensor:
        """Apply the matrix T[step] of one step to states (B, H, N, P)."""
        if self.feedback is not None:
            return self.feedback.step(state, step)
        assert self.erasure is not None
        erase, taken = (x[:, step] for x in self.erasure)
        found = torch.einsum("bhn,bhnp->bhp", erase, state)
        faded = state * self.log_decay[:, step].exp()[..., None]
        return faded - taken[..., None] * found[:, :, None]

    def _run_by_step(self, state: Tensor, steps: slice) -> Tensor:
        for step in range(steps.start, steps.stop):
            written = self.key[:, step, :, :, None] * self.value[:, step, :, None]
            state = self._step(state, step) + written
        return state

    def _skip_by_step(self, first: int, between: range) -> tuple[Tensor, Tensor]:
        share, before = self.key[:, first, ..., None], []  # before each step, (B, H, N, 1)
        for step in between:
            before.append(share[..., 0])
            share = self._step(share, step)
        pairs = zip(self._products(between.stop - 1), reversed(before), strict=False)
        each = [torch.einsum("bhmn,bhn->bhm", product, x) for (_, product), x in pairs]
        return torch.stack(each[::-1], 2) if each else share, share[..., 0]

    def _erased_by_step(self, first: int, last: int) -> Tensor:
        share = self.key[:, first]  # (B, H, N)
        unit = share / share.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
        erased = []
        for step in range(first + 1, last + 1):
            after = self._step(share[..., None], step)[..., 0]
            erased.append(((share - after) * unit).sum(-1))
            share = after
        return torch.stack(erased, -1)


def _sums_after(logs: Tensor) -> Tensor:
    """Return for each step the sum of ``logs`` (B, L, ...) over all later steps, (B, L, ...).

    A cumulative sum from the end is exact after a reset, unlike a difference of two sums.
    """
    found = logs.flip(1).cumsum(1).flip(1).roll(-1, 1)
    found[:, -1:] = 0
    return found


def alike(operator: Operator) -> list[range]:
    """Return ranges of heads, so that all heads of a range have the same operator."""
    cuts = {0, operator.shape.heads, *_seams(operator)}
    return [range(*ends) for ends in pairwise(sorted(cuts))]


def _seams(operator: Operator) -> Iterator[int]:
    """Yield the head index after each operator of a direct sum (operators on separate heads)."""
    first = 0
    for part in operator.parts if isinstance(operator, Composite) else ():
        yield from (first + seam for seam in _seams(part))
        if isinstance(operator, DirectSum):
            first += part.shape.heads
            yield first


def memories_of(operator: Operator, values: Tensor) -> list[Memory | Cache]:
    """Return the memories of an operator: one for each recurrence or causal attention in it.

    Args:
        operator: the operator.
        values: the input of the operator (B, L, H, P).

    Returns:
        One :class:`Memory` per recurrence (two for the directions of a Vision Mamba), and one
        :class:`.Cache` per causal attention. Other operators add nothing.
    """
    found: list[Memory | Cache] = []
    for parts in products_of(operator):
        at = [i for i, part in enumerate(parts) if isinstance(part, Stateful | DenseHeads)]
        if len(at) != 1:
            continue
        mixer, inner = parts[at[0]], parts[at[0] + 1 :]
        written = Chain(*inner).affine(values) if inner else values
        if isinstance(mixer, DenseHeads):
            if is_causal(mixer) and not any(isinstance(part, Permute) for part in parts):
                found.append(Cache(written, mixer.matrices))
            continue
        order = torch.arange(values.shape[1], device="cpu")
        for part in reversed(inner):
            order = order[part.on_host] if isinstance(part, Permute) else order
        found.append(_memory(mixer, written, order))  # type: ignore[arg-type]
    return found


def _memory(scan: Stateful, value: Tensor, order: Tensor) -> Memory:
    """Convert a recurrence to a :class:`Memory`, given ``value`` and the order of tokens."""
    heads = scan.shape.heads
    if isinstance(scan, SelectiveScan):
        rows = scan.b if scan.b.dim() == 4 else scan.b[:, :, None]
        key = vectors_of_heads(rows, heads) * scan.dt[..., None]
        return Memory(key, value, scan.dt[..., None] * scan.a, order)
    if isinstance(scan, ElementwiseRecurrence):
        logs = scan.decay.log()[..., None]
        return Memory(torch.ones_like(logs), value, logs, order)
    if isinstance(scan, FeedbackRecurrence):
        # the P channels mix: they are the N numbers of the state, so the value is used as the key
        key, one = scan.write * value, torch.ones_like(value[..., :1])
        return Memory(key, one, scan.decay.log(), order, feedback=scan)
    if isinstance(scan, DeltaRule):
        logs = torch.zeros_like(scan.beta) if scan.log_decay is None else scan.log_decay
        logs = logs if logs.dim() == 4 else logs[..., None]
        key, erase, taken = scan.corrections()
        return Memory(key, value, logs, order, erasure=(erase, taken))
    key = vectors_of_heads(scan.key, heads)
    if isinstance(scan, VectorDecayHeads):
        return Memory(key, value, scan.log_decay, order)
    if scan.scale is not None:
        key = key * scan.scale[..., None]
    return Memory(key, value, scan.log_decay[..., None], order)
