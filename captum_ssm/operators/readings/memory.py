"""What the state of a recurrence holds of each token that wrote to it, and who took it away.

    S[t] = sum over j <= t of K[t, j] v[j]^T,      K[t, j] = T[t] ... T[j + 1] k[j]

T being what a step does to a state: a decay for each head or state, for delta rules the correction
that erases along a key, and for a recurrence that hears its own outputs what it hears.  All of it
is found for one t, or from one j, in a time linear in the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..base import Operator
from ..chain import Chain
from ..combine import Composite, DirectSum
from ..heads import DenseHeads
from ..kernels.portions import vectors_of_heads
from ..recurrences.delta_rule import DeltaRule
from ..recurrences.elementwise import ElementwiseRecurrence
from ..recurrences.feedback import FeedbackRecurrence
from ..recurrences.scalar_decay import ScalarDecayHeads
from ..recurrences.selective_scan import SelectiveScan
from ..recurrences.vector_decay import VectorDecayHeads
from ..reorder import Permute
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

#: The logarithm of a decay that leaves nothing.
_RESET = -1e4


class Memory(NamedTuple):
    """A recurrence and what it is given, tokens in the order in which it reads them.

    Attributes:
        key: what a token's value is written along (B, L, H, N).
        value: what is written (B, L, H, P).
        log_decay: of each step (B, L, H, 1 or N), at most 0.
        erases: for a delta rule what the state before each step is asked by, and along what is
            taken away that it finds, (B, L, H, N) each; else None.
        order: the token that each step reads (L,), on the host.
        feeds: a recurrence that hears its own outputs, whose values are written along themselves,
            as keys of the value 1. Default: None, of another kind.
    """

    key: Tensor
    value: Tensor
    log_decay: Tensor
    erases: tuple[Tensor, Tensor] | None
    order: Tensor
    feeds: FeedbackRecurrence | None = None

    @property
    def fades(self) -> bool:
        """Whether every number of the state fades by itself."""
        return self.erases is None and self.feeds is None

    @property
    def width(self) -> int:
        """Numbers that are kept of a token, for each value channel."""
        return self.key.shape[-1]

    def step_of(self, token: int) -> int:
        """The step at which a token is read."""
        return int((self.order == token).nonzero()[0, 0])

    def kept(self, token: int) -> Tensor:
        """K[t, j] for all tokens j, after a token was read (B, L, H, N); 0 for those to come."""
        step = self.step_of(token)
        found = torch.zeros_like(self.key)
        found[:, : step + 1] = self._decayed(step) if self.fades else self._passed(step)
        return found[:, self.order.argsort()]

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The states after tokens were read, (B, T, H, N, P), all in one pass over the steps."""
        batch, _, heads, width = self.key.shape
        state = self.key.new_zeros(batch, heads, width, self.value.shape[-1])
        found, start = {}, 0
        for step in sorted(map(self.step_of, tokens)):
            steps = slice(start, step + 1)
            if step >= start:
                state = self._faded(state, steps) if self.fades else self._ran(state, steps)
            found[step], start = state, step + 1
        return torch.stack([found[self.step_of(token)] for token in tokens], 1)

    def sizes(self, token: int) -> Tensor:
        """How large the share of each token in the state is, by head (B, H, L).

        The norm of K[t, j] v[j]^T.
        """
        value = self.value[:, self.order.argsort()]
        found: Tensor = self.kept(token).norm(dim=-1) * value.norm(dim=-1)
        return found.transpose(1, 2)

    def erased(self, source: int, token: int) -> Tensor:
        """Who took away what is missing of a token's share, by head (B, H, L).

        Where states fade each by itself, what it lost goes to the tokens between in proportion to
        their logarithms of decays.  In a delta rule every step takes what the share is shorter
        after it, along the share as it was written.  Either way it sums to |k v^T| times what is
        gone of it: of the lengths of its entries, or along itself.
        """
        first, last = self.step_of(source), self.step_of(token)
        found = self.key.new_zeros(*self.key.shape[:3]).transpose(1, 2)  # (B, H, L)
        if last > first:
            size = self.value[:, first].norm(dim=-1)  # (B, H)
            taken = self._by_decay(first, last) if self.fades else self._by_step(first, last)
            found[..., first + 1 : last + 1] = taken * size[..., None]
        return found[..., self.order.argsort()]

    def without(self, source: int, token: int) -> Tensor:
        """How much would be held of a source, had each token's step left the state as it was.

        By head (B, H, L); for tokens that are not between, how much is.
        """
        first, last = self.step_of(source), self.step_of(token)
        if last < first:
            return self.key.new_zeros(*self.key.shape[:3]).transpose(1, 2)
        between = range(first + 1, last + 1)
        each, whole = (
            self._faded_but_once(first, between)
            if self.fades
            else self._corrected_but_once(first, between)
        )
        found: Tensor = whole.norm(dim=-1)[..., None].repeat(1, 1, self.key.shape[1])  # (B, H, L)
        if between:
            found[..., between.start : between.stop] = each.norm(dim=-1)
        found *= self.value[:, first].norm(dim=-1)[..., None]
        return found[..., self.order.argsort()]

    def half_lives(self) -> Tensor:
        """After how many tokens half of a share is left, by the mean decay (B, H, 1 or N).

        Steps that leave nothing at all are not counted: nobody outlives them.
        """
        counted = self.log_decay > _RESET
        total = self.log_decay.where(counted, 0).sum(1)
        mean = total / counted.sum(1).clamp_min(1)
        return math.log(2) / -mean.clamp_max(-torch.finfo(mean.dtype).tiny)

    # --- decays alone ----------------------------------------------------------------------

    def _decayed(self, step: int) -> Tensor:
        return _summed_behind(self.log_decay[:, : step + 1]).exp() * self.key[:, : step + 1]

    def _faded(self, state: Tensor, steps: slice) -> Tensor:
        """The state some steps later."""
        logs = self.log_decay[:, steps]
        later = _summed_behind(logs)
        written = later.exp() * self.key[:, steps]
        faded = logs.sum(1).exp()[..., None] * state
        return torch.einsum("bjhn,bjhp->bhnp", written, self.value[:, steps]).add_(faded)

    def _faded_but_once(self, first: int, between: range) -> tuple[Tensor, Tensor]:
        """A share without each of the steps between, (B, H, S, N), and with all, (B, H, N)."""
        logs = self.log_decay[:, between.start : between.stop]
        before = logs.cumsum(1).roll(1, 1)  # no difference of sums: a reset would undo itself
        before[:, :1] = 0
        each = (before + _summed_behind(logs)).exp() * self.key[:, first, None]
        return each.transpose(1, 2), logs.sum(1).exp() * self.key[:, first]

    def _by_decay(self, first: int, last: int) -> Tensor:
        logs = self.log_decay[:, first + 1 : last + 1].clamp_min(_RESET)
        total = logs.sum(1, keepdim=True)
        share = torch.where(total < 0, logs / torch.where(total < 0, total, -1.0), 0.0)
        gone = -torch.expm1(total) * self.key[:, first : first + 1].abs()
        return (share * gone).sum(-1).transpose(1, 2)

    # --- where numbers of a state mix --------------------------------------------------------

    def _passed(self, step: int) -> Tensor:
        pairs = self._backwards(step)
        found = [torch.einsum("bhmn,bhn->bhm", through, self.key[:, j]) for j, through in pairs]
        return torch.stack(found[::-1], 1)

    def _backwards(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """What passes from each step up to one, the last first: T[step] ... T[j + 1]."""
        width = self.key.shape[-1]
        through = torch.eye(width, dtype=self.key.dtype, device=self.key.device)
        through = through.expand(*self.key.shape[:1], self.key.shape[2], width, width)
        for j in range(step, -1, -1):
            yield j, through
            if self.feeds is not None:
                unit = torch.eye(width, dtype=self.key.dtype, device=self.key.device)
                through = through @ self.feeds.step(unit.expand_as(through), j)
            else:
                assert self.erases is not None
                asked, taken = (x[:, j] for x in self.erases)
                erased = torch.einsum("bhmn,bhn->bhm", through, taken)
                kept = through * self.log_decay[:, j].exp()[..., None, :]
                through = kept - erased[..., None] * asked[:, :, None]

    def _stepped(self, state: Tensor, step: int) -> Tensor:
        """T[step] times states (B, H, N, P)."""
        if self.feeds is not None:
            return self.feeds.step(state, step)
        assert self.erases is not None
        asked, taken = (x[:, step] for x in self.erases)
        found = torch.einsum("bhn,bhnp->bhp", asked, state)
        kept = state * self.log_decay[:, step].exp()[..., None]
        return kept - taken[..., None] * found[:, :, None]

    def _ran(self, state: Tensor, steps: slice) -> Tensor:
        """The state some steps later."""
        for step in range(steps.start, steps.stop):
            written = self.key[:, step, :, :, None] * self.value[:, step, :, None]
            state = self._stepped(state, step) + written
        return state

    def _corrected_but_once(self, first: int, between: range) -> tuple[Tensor, Tensor]:
        """As :meth:`_faded_but_once`."""
        share, before = self.key[:, first, ..., None], []  # before each step, (B, H, N, 1)
        for step in between:
            before.append(share[..., 0])
            share = self._stepped(share, step)
        pairs = zip(self._backwards(between.stop - 1), reversed(before), strict=False)
        each = [torch.einsum("bhmn,bhn->bhm", through, x) for (_, through), x in pairs]
        return torch.stack(each[::-1], 2) if each else share, share[..., 0]

    def _by_step(self, first: int, last: int) -> Tensor:
        share = self.key[:, first]  # (B, H, N)
        unit = share / share.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
        left, taken = share, []
        for s in range(first + 1, last + 1):
            after = self._stepped(left[..., None], s)[..., 0]
            taken.append(((left - after) * unit).sum(-1))
            left = after
        return torch.stack(taken, -1)


def _summed_behind(logs: Tensor) -> Tensor:
    """Of each step the sum over those behind it, (B, L, ...).

    From the back: no difference of large sums, and a reset stays one.
    """
    found = logs.flip(1).cumsum(1).flip(1).roll(-1, 1)
    found[:, -1:] = 0
    return found


def alike(operator: Operator) -> list[range]:
    """The heads of an operator, those of each part by themselves where parts stand side by side."""
    cuts = {0, operator.shape.heads, *_seams(operator)}
    return [range(*ends) for ends in pairwise(sorted(cuts))]


def _seams(operator: Operator) -> Iterator[int]:
    """At which heads parts end that stand side by side."""
    first = 0
    for part in operator.parts if isinstance(operator, Composite) else ():
        yield from (first + seam for seam in _seams(part))
        if isinstance(operator, DirectSum):
            first += part.shape.heads
            yield first


def memories_of(operator: Operator, values: Tensor) -> list[Memory | Cache]:
    """The recurrences and causal attention of an operator, and what each is given of the values.

    Args:
        operator: the operator.
        values: what it acts on (B, L, H, P).

    Returns:
        One for each recurrence, such as the two directions of a Vision Mamba, or for attention its
        cache; none where tokens are mixed by other means.
    """
    found: list[Memory | Cache] = []
    for parts in products_of(operator):
        at = [i for i, part in enumerate(parts) if isinstance(part, Stateful | DenseHeads)]
        if len(at) != 1:
            continue
        behind = parts[at[0] + 1 :]
        given = Chain(*behind).affine(values) if behind else values
        mixes = parts[at[0]]
        if isinstance(mixes, DenseHeads):
            if is_causal(mixes) and not any(isinstance(part, Permute) for part in parts):
                found.append(Cache(given, mixes.matrices))
            continue
        order = torch.arange(values.shape[1], device="cpu")
        for part in reversed(behind):
            order = order[part.on_host] if isinstance(part, Permute) else order
        found.append(_memory(mixes, given, order))  # type: ignore[arg-type]
    return found


def _memory(scan: Stateful, value: Tensor, order: Tensor) -> Memory:
    heads = scan.shape.heads
    if isinstance(scan, SelectiveScan):
        rows = scan.b if scan.b.dim() == 4 else scan.b[:, :, None]
        key = vectors_of_heads(rows, heads) * scan.dt[..., None]
        return Memory(key, value, scan.dt[..., None] * scan.a, None, order)
    if isinstance(scan, ElementwiseRecurrence):
        logs = scan.decay.log()[..., None]
        return Memory(torch.ones_like(logs), value, logs, None, order)
    if isinstance(scan, FeedbackRecurrence):
        written = scan.write * value
        return Memory(written, torch.ones_like(value[..., :1]), scan.decay.log(), None, order, scan)
    if isinstance(scan, DeltaRule):
        logs = torch.zeros_like(scan.beta) if scan.log_decay is None else scan.log_decay
        logs = logs if logs.dim() == 4 else logs[..., None]
        key, *erases = scan.corrections()
        return Memory(key, value, logs, (erases[0], erases[1]), order)
    key = vectors_of_heads(scan.key, heads)
    if isinstance(scan, VectorDecayHeads):
        return Memory(key, value, scan.log_decay, None, order)
    if scan.scale is not None:
        key = key * scan.scale[..., None]
    return Memory(key, value, scan.log_decay[..., None], None, order)
