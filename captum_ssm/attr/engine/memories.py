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

    def decayed_keys(self, token: int) -> Tensor:
        """Return the decayed keys K[token, j] of all tokens j, (B, L, H, N); 0 for later tokens."""
        step = self.step_of(token)
        keys = torch.zeros_like(self.key)
        keys[:, : step + 1] = self._keys_by_decay(step) if self.fades else self._keys_by_step(step)
        return keys[:, self.order.argsort()]  # from steps to tokens

    def states(self, tokens: Sequence[int]) -> Tensor:
        """Return the state after each of T tokens, (B, T, H, N, P), in one pass over the steps."""
        batch, _, heads, width = self.key.shape
        state = self.key.new_zeros(batch, heads, width, self.value.shape[-1])
        states, start = {}, 0
        for step in sorted(map(self.step_of, tokens)):
            steps = slice(start, step + 1)
            if step >= start:  # else the token is in ``tokens`` twice
                advance = self._advance_by_decay if self.fades else self._advance_by_step
                state = advance(state, steps)
            states[step], start = state, step + 1
        return torch.stack([states[self.step_of(token)] for token in tokens], 1)

    def sizes(self, token: int) -> Tensor:
        """Return the norm (B, H, L) of each token's share in the state after ``token``."""
        value = self.value[:, self.order.argsort()]
        sizes: Tensor = self.decayed_keys(token).norm(dim=-1) * value.norm(dim=-1)
        return sizes.transpose(1, 2)

    def erased(self, source: int, token: int) -> Tensor:
        """Return the loss of the source's share at each token up to ``token``, (B, H, L).

        If T is diagonal, the loss is summed over the key's elements and divided among the tokens
        in between, in proportion to the logarithms of their decays.  Otherwise the loss at a step
        is the decrease of the component along the original share, which may be negative.
        """
        first, last = self.step_of(source), self.step_of(token)
        loss = self.key.new_zeros(*self.key.shape[:3]).transpose(1, 2)  # (B, H, L)
        if last > first:
            value_norm = self.value[:, first].norm(dim=-1)  # (B, H)
            loss_of_key = self._erased_by_decay if self.fades else self._erased_by_step
            loss[..., first + 1 : last + 1] = loss_of_key(first, last) * value_norm[..., None]
        return loss[..., self.order.argsort()]  # from steps to tokens

    def without(self, source: int, token: int) -> Tensor:
        """Return the norm of the source's share if one token's step had not changed the state.

        The result (B, H, L) has one entry per omitted token. Only steps after ``source`` up to
        ``token`` change the norm.
        """
        first, last = self.step_of(source), self.step_of(token)
        if last < first:
            return self.key.new_zeros(*self.key.shape[:3]).transpose(1, 2)
        between = range(first + 1, last + 1)
        keys_without = self._keys_without_by_decay if self.fades else self._keys_without_by_step
        without_each, decayed = keys_without(first, between)
        norms: Tensor = decayed.norm(dim=-1)[..., None].repeat(1, 1, self.key.shape[1])  # (B, H, L)
        if between:
            norms[..., between.start : between.stop] = without_each.norm(dim=-1)
        norms *= self.value[:, first].norm(dim=-1)[..., None]
        return norms[..., self.order.argsort()]

    def half_lives(self) -> Tensor:
        """Return the half-life of a share in tokens, from the mean log decay (B, H, 1 or N).

        Steps that reset the state to 0 are left out of the mean.
        """
        is_counted = self.log_decay > _RESET
        total = self.log_decay.where(is_counted, 0).sum(1)
        mean = total / is_counted.sum(1).clamp_min(1)
        # without decay the half-life is very large, but finite
        return math.log(2) / -mean.clamp_max(-torch.finfo(mean.dtype).tiny)

    # --- T diagonal: sums of logarithms ------------------------------------------------------

    def _keys_by_decay(self, step: int) -> Tensor:
        """Return the decayed keys K[step, j] for j = 0 to ``step``, if T is diagonal."""
        return _sums_after(self.log_decay[:, : step + 1]).exp() * self.key[:, : step + 1]

    def _advance_by_decay(self, state: Tensor, steps: slice) -> Tensor:
        """Run some steps from a state (B, H, N, P), and return the new state, if T is diagonal."""
        logs = self.log_decay[:, steps]
        written = _sums_after(logs).exp() * self.key[:, steps]
        faded = logs.sum(1).exp()[..., None] * state
        return torch.einsum("bjhn,bjhp->bhnp", written, self.value[:, steps]).add_(faded)

    def _keys_without_by_decay(self, first: int, between: range) -> tuple[Tensor, Tensor]:
        """Return the key of step ``first`` (B, H, S, N), decayed by all of S steps but one each.

        Also return the key decayed by all S steps, (B, H, N).
        """
        logs = self.log_decay[:, between.start : between.stop]
        # over earlier steps; the difference of two sums would be inexact after a reset
        sums_before = logs.cumsum(1).roll(1, 1)
        sums_before[:, :1] = 0
        without_each = (sums_before + _sums_after(logs)).exp() * self.key[:, first, None]
        return without_each.transpose(1, 2), logs.sum(1).exp() * self.key[:, first]

    def _erased_by_decay(self, first: int, last: int) -> Tensor:
        """Return the loss of the key of step ``first`` at each later step, (B, H, steps).

        The loss at step t is the sum over elements of |k| (1 - exp(sum of logs)) logs[t] / sum of
        logs, with the logs of the decays, limited so that a decay of 0 has a finite one.
        """
        logs = self.log_decay[:, first + 1 : last + 1].clamp_min(_RESET)
        total = logs.sum(1, keepdim=True)
        # without any decay, 0 instead of 0 / 0
        fraction = torch.where(total < 0, logs / torch.where(total < 0, total, -1.0), 0.0)
        loss = -torch.expm1(total) * self.key[:, first : first + 1].abs()
        return (fraction * loss).sum(-1).transpose(1, 2)

    # --- any T: one step at a time -----------------------------------------------------------

    def _keys_by_step(self, step: int) -> Tensor:
        """Return the decayed keys K[step, j] for j = 0 to ``step``, for any T."""
        products = self._products(step)
        keys = [torch.einsum("bhmn,bhn->bhm", product, self.key[:, j]) for j, product in products]
        return torch.stack(keys[::-1], 1)  # products come last step first

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
        """Apply T[step] to states (B, H, N, P): diag(decay) state - taken (erase^T state)."""
        if self.feedback is not None:
            return self.feedback.step(state, step)
        assert self.erasure is not None
        erase, taken = (x[:, step] for x in self.erasure)
        read = torch.einsum("bhn,bhnp->bhp", erase, state)
        faded = state * self.log_decay[:, step].exp()[..., None]
        return faded - taken[..., None] * read[:, :, None]

    def _advance_by_step(self, state: Tensor, steps: slice) -> Tensor:
        """Run some steps from a state (B, H, N, P), and return the new state, for any T."""
        for step in range(steps.start, steps.stop):
            written = self.key[:, step, :, :, None] * self.value[:, step, :, None]
            state = self._step(state, step) + written
        return state

    def _keys_without_by_step(self, first: int, between: range) -> tuple[Tensor, Tensor]:
        """Return the results of :meth:`_keys_without_by_decay` for any T.

        They are the key before each omitted step, times the product of all later steps; and the key
        after all steps.
        """
        share, before_steps = self.key[:, first, ..., None], []  # (B, H, N, 1)
        for step in between:
            before_steps.append(share[..., 0])
            share = self._step(share, step)
        # not strict: products go on to step 0, and are needed only for steps in `between`
        pairs = zip(self._products(between.stop - 1), reversed(before_steps), strict=False)
        without_each = [torch.einsum("bhmn,bhn->bhm", product, key) for (_, product), key in pairs]
        return torch.stack(without_each[::-1], 2) if without_each else share, share[..., 0]

    def _erased_by_step(self, first: int, last: int) -> Tensor:
        """Return the decrease of the key of step ``first`` along itself at each later step."""
        key = self.key[:, first]  # (B, H, N)
        direction = key / key.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(key.dtype).tiny)
        losses = []
        for step in range(first + 1, last + 1):
            after = self._step(key[..., None], step)[..., 0]
            losses.append(((key - after) * direction).sum(-1))
            key = after
        return torch.stack(losses, -1)


def _sums_after(logs: Tensor) -> Tensor:
    """Return for each step the sum of ``logs`` (B, L, ...) over all later steps, (B, L, ...).

    A cumulative sum from the end is exact after a reset, unlike a difference of two sums.
    """
    sums = logs.flip(1).cumsum(1).flip(1).roll(-1, 1)
    sums[:, -1:] = 0
    return sums


def head_ranges(operator: Operator) -> list[range]:
    """Return ranges of heads, so that all heads of a range have the same operator."""
    edges = {0, operator.shape.heads, *_range_ends(operator)}
    return [range(*pair) for pair in pairwise(sorted(edges))]


def _range_ends(operator: Operator) -> Iterator[int]:
    """Yield where heads of one operator end: in direct sums, also inside of other operators."""
    first = 0  # the first head of the part in its direct sum
    for part in operator.parts if isinstance(operator, Composite) else ():
        yield from (first + end for end in _range_ends(part))
        if isinstance(operator, DirectSum):
            first += part.shape.heads
            yield first


def memories_of(operator: Operator, values: Tensor) -> list[Memory | Cache]:
    """Return the memories of an operator, given its input ``values`` (B, L, H, P).

    Each recurrence becomes a :class:`Memory` (two for the directions of a Vision Mamba), and each
    causal attention a :class:`.Cache`. Other operators add nothing.
    """
    memories: list[Memory | Cache] = []
    for parts in products_of(operator):
        indices = [i for i, part in enumerate(parts) if isinstance(part, Stateful | DenseHeads)]
        if len(indices) != 1:  # no mixer, or several, whose states have no known shares
            continue
        mixer, inner = parts[indices[0]], parts[indices[0] + 1 :]
        value = Chain(*inner).affine(values) if inner else values
        if isinstance(mixer, DenseHeads):  # a cache has no `order`: nothing may be permuted
            if is_causal(mixer) and not any(isinstance(part, Permute) for part in parts):
                memories.append(Cache(value, mixer.matrices))
            continue
        order = torch.arange(values.shape[1], device="cpu")  # the token that each step reads
        for part in reversed(inner):  # the innermost operator acts first
            order = order[part.on_host] if isinstance(part, Permute) else order
        memories.append(_memory(mixer, value, order))  # type: ignore[arg-type]
    return memories


def _memory(scan: Stateful, value: Tensor, order: Tensor) -> Memory:
    """Convert a recurrence to a :class:`Memory`, given its values and the order of tokens."""
    heads = scan.shape.heads
    if isinstance(scan, SelectiveScan):  # k = dt B, log decay = dt A
        b = scan.b if scan.b.dim() == 4 else scan.b[:, :, None]
        key = vectors_of_heads(b, heads) * scan.dt[..., None]
        return Memory(key, value, scan.dt[..., None] * scan.a, order)
    if isinstance(scan, ElementwiseRecurrence):
        logs = scan.decay.log()[..., None]
        return Memory(torch.ones_like(logs), value, logs, order)
    if isinstance(scan, FeedbackRecurrence):
        # the P channels mix: they are the N numbers of the state, so the value is used as the key
        key, ones = scan.write * value, torch.ones_like(value[..., :1])
        return Memory(key, ones, scan.decay.log(), order, feedback=scan)
    if isinstance(scan, DeltaRule):
        logs = torch.zeros_like(scan.beta) if scan.log_decay is None else scan.log_decay
        logs = logs if logs.dim() == 4 else logs[..., None]
        key, erase, taken = scan.corrections()
        return Memory(key, value, logs, order, erasure=(erase, taken))
    key = vectors_of_heads(scan.key, heads)
    if isinstance(scan, VectorDecayHeads):
        return Memory(key, value, scan.log_decay, order)
    if scan.scale is not None:  # such as dt of Mamba-2
        key = key * scan.scale[..., None]
    return Memory(key, value, scan.log_decay[..., None], order)
