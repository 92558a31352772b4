"""What the state of a recurrence holds of each token that wrote to it, and who took it away.

    S[t] = sum over j <= t of K[t, j] v[j]^T,      K[t, j] = T[t] ... T[j + 1] k[j]

T being what a step does to a state: a decay for each head or state, and for delta rules the
correction that erases along a key.  All of it is found for one t, or from one j, in a time linear
in the number of tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..base import Operator
from ..chain import Chain
from ..kernels.portions import vectors_of_heads
from ..recurrences.delta_rule import DeltaRule
from ..recurrences.elementwise import ElementwiseRecurrence
from ..recurrences.scalar_decay import ScalarDecayHeads
from ..recurrences.selective_scan import SelectiveScan
from ..recurrences.vector_decay import VectorDecayHeads
from ..reorder import Permute
from .states import products_of

#: Recurrences that have a state.
Stateful = SelectiveScan | ScalarDecayHeads | VectorDecayHeads | DeltaRule | ElementwiseRecurrence


#: The logarithm of a decay that leaves nothing.
_RESET = -1e4


class Memory(NamedTuple):
    """A recurrence and what it is given, tokens in the order in which it reads them.

    Attributes:
        key: what a token's value is written along (B, L, H, N).
        value: what is written (B, L, H, P).
        log_decay: of each step (B, L, H, 1 or N), at most 0.
        erases: for a delta rule the key and the step of its corrections (B, L, H, N) and
            (B, L, H, 1); else None.
        order: the token that each step reads (L,).
    """

    key: Tensor
    value: Tensor
    log_decay: Tensor
    erases: tuple[Tensor, Tensor] | None
    order: Tensor

    def step_of(self, token: int) -> int:
        """The step at which a token is read."""
        return int((self.order == token).nonzero()[0, 0])

    def kept(self, token: int) -> Tensor:
        """K[t, j] for all tokens j, after a token was read (B, L, H, N); 0 for those to come."""
        step = self.step_of(token)
        found = torch.zeros_like(self.key)
        found[:, : step + 1] = self._decayed(step) if self.erases is None else self._passed(step)
        return found[:, self.order.argsort()]

    def state(self, token: int) -> Tensor:
        """The state after a token was read, (B, H, N, P)."""
        value = self.value[:, self.order.argsort()]
        return torch.einsum("bjhn,bjhp->bhnp", self.kept(token), value)

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
            taken = (
                self._by_decay(first, last) if self.erases is None else self._by_step(first, last)
            )
            found[..., first + 1 : last + 1] = taken * size[..., None]
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
        logs = self.log_decay[:, 1 : step + 1]
        # summed from the back: no difference of large sums, and a reset stays one
        later = logs.flip(1).cumsum(1).flip(1)
        passed = torch.cat([later.exp(), torch.ones_like(self.log_decay[:, :1])], 1)
        return passed * self.key[:, : step + 1]

    def _by_decay(self, first: int, last: int) -> Tensor:
        logs = self.log_decay[:, first + 1 : last + 1].clamp_min(_RESET)
        total = logs.sum(1, keepdim=True)
        share = torch.where(total < 0, logs / torch.where(total < 0, total, -1.0), 0.0)
        gone = -torch.expm1(total) * self.key[:, first : first + 1].abs()
        return (share * gone).sum(-1).transpose(1, 2)

    # --- with corrections ------------------------------------------------------------------

    def _passed(self, step: int) -> Tensor:
        assert self.erases is not None
        along, size = self.erases
        width = self.key.shape[-1]
        through = torch.eye(width, dtype=self.key.dtype, device=self.key.device)
        through = through.expand(*self.key.shape[:1], self.key.shape[2], width, width)
        found = []
        for j in range(step, -1, -1):
            found.append(torch.einsum("bhmn,bhn->bhm", through, self.key[:, j]))
            erased = torch.einsum("bhmn,bhn->bhm", through, along[:, j]) * size[:, j]
            through = through - erased[..., None] * along[:, j, :, None]
            through = through * self.log_decay[:, j].exp()[..., None, :]
        return torch.stack(found[::-1], 1)

    def _by_step(self, first: int, last: int) -> Tensor:
        assert self.erases is not None
        along, size = self.erases
        share = self.key[:, first]  # (B, H, N)
        unit = share / share.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
        left, taken = share, []
        for s in range(first + 1, last + 1):
            after = left * self.log_decay[:, s].exp()
            found = (along[:, s] * after).sum(-1, keepdim=True)
            after = after - size[:, s] * found * along[:, s]
            taken.append(((left - after) * unit).sum(-1))
            left = after
        return torch.stack(taken, -1)


def memories_of(operator: Operator, values: Tensor) -> list[Memory]:
    """The recurrences of an operator, and what each is given of the values.

    Args:
        operator: the operator.
        values: what it acts on (B, L, H, P).

    Returns:
        One for each recurrence, such as the two directions of a Vision Mamba; none where tokens
        are mixed by other means.
    """
    found = []
    for parts in products_of(operator):
        at = [i for i, part in enumerate(parts) if isinstance(part, Stateful)]
        if len(at) != 1:
            continue
        behind = parts[at[0] + 1 :]
        given = Chain(*behind).affine(values) if behind else values
        order = torch.arange(values.shape[1], device=values.device)
        for part in reversed(behind):
            order = order[part.order] if isinstance(part, Permute) else order
        found.append(_memory(parts[at[0]], given, order))  # type: ignore[arg-type]
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
    if isinstance(scan, DeltaRule):
        size = scan.beta[..., None]
        logs = torch.zeros_like(size) if scan.log_decay is None else scan.log_decay
        logs = logs if logs.dim() == 4 else logs[..., None]
        return Memory(size * scan.key, value, logs, (scan.key, size), order)
    key = vectors_of_heads(scan.key, heads)
    if isinstance(scan, VectorDecayHeads):
        return Memory(key, value, scan.log_decay, None, order)
    if scan.scale is not None:
        key = key * scan.scale[..., None]
    return Memory(key, value, scan.log_decay[..., None], None, order)
