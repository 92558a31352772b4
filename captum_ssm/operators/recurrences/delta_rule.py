"""The delta rule with decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention.

    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   y[t] = q[t] . S[t]

Given q, k, beta and the decays this is linear in v; the matrix is
(Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), E the products of decays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import Operator, Shape
from ..kernels.arithmetic import exponential, times
from ..kernels.chunks import Chunk, Steps, in_chunks, put, stacked
from ..kernels.within_chunk import Decays, decayed, inverse
from .base import ChunkedHeads


class DeltaRule(ChunkedHeads):
    """A state that is corrected towards each new value along its key.

    S[t] = decay[t] S[t-1], then S[t] += beta[t] k[t] (v[t] - k[t] . S[t]), and y[t] = q[t] . S[t].
    Its matrix is (Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), where E holds the
    products of decays.

    Args:
        query: (B, L, H, N).
        key: (B, L, H, N).
        beta: step sizes (B, L, H).
        log_decay: logarithms of the decays, per head (B, L, H) or per key channel (B, L, H, N);
            None for no decay.
        per_head: value channels of a head, P.
        component: name of the part it stands for. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import DeltaRule
        >>> key = torch.ones(1, 3, 1, 1)  # one key for all: each value replaces the one before
        >>> memory = DeltaRule(key, key, torch.ones(1, 3, 1), None, per_head=1)
        >>> torch.allclose(memory.dense(), torch.eye(3))
        True
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        per_head: int,
        component: str | None = "scan",
    ) -> None:
        self.query, self.key, self.beta = query.detach(), key.detach(), beta.detach()
        self.log_decay = None if log_decay is None else log_decay.detach()
        self.component = component
        self.shape = Shape(beta.shape[0], beta.shape[1], beta.shape[2], per_head)

    def tensors(self) -> dict[str, Tensor]:
        named = {"query": self.query, "key": self.key, "beta": self.beta}
        return named if self.log_decay is None else {**named, "log_decay": self.log_decay}

    def select(self, heads: Sequence[int]) -> Operator:
        chosen = list(heads)
        return DeltaRule(
            self.query[:, :, chosen],
            self.key[:, :, chosen],
            self.beta[:, :, chosen],
            None if self.log_decay is None else self.log_decay[:, :, chosen],
            self.shape.per_head,
            self.component,
        )

    def chunk(self, part: slice, length: int) -> Chunk:
        it = self._corrected(part, length)
        q_before, k_before, k_after = it.q_before, it.k_before, it.k_after
        if it.since is not None and it.until is not None:
            q_before, k_before, k_after = (
                q_before * it.since,
                k_before * it.since,
                k_after * it.until,
            )
        inner, writes = it.read @ it.solved, it.solved.mT @ k_after
        reads = q_before - inner @ k_before
        carry = (writes.mT @ k_before).neg_()
        carry.diagonal(dim1=-2, dim2=-1).add_(it.total.squeeze(-1))
        return Chunk(part, inner, reads, writes, carry)

    def _steps(self, length: int, transposed: bool) -> Steps:
        """By the corrected values: chunks' own matrices would cost more."""
        state: Tensor | None = None

        def step(v: Tensor, part: slice, out: Tensor) -> None:
            nonlocal state
            it, x = self._corrected(part, length), stacked(v, length)
            if state is None:
                state = x.new_zeros(x.shape[:2].numel(), self.key.shape[-1], x.shape[-1])
            result, state = it.adjoint(x, state) if transposed else it.forward(x, state)
            put(result, out)

        return step

    def _corrected(self, part: slice, length: int) -> _Corrected:
        q, k = (in_chunks(x[:, part], length) for x in (self.query, self.key))
        (read, corrected), *factors = self._decayed(q, k, part, length)
        beta = in_chunks(self.beta[:, part, :, None], length)  # (B, H, C, T, 1)
        # w[i] depends on the w before it: a triangular system, of ones on the diagonal
        solved = inverse(corrected.mul_(beta)).mul_(beta.mT)
        return _Corrected(solved, read, *factors)

    def _decayed(self, q: Tensor, k: Tensor, part: slice, length: int) -> tuple[Any, ...]:
        """Products of q and k with k, and the other attributes of :class:`_Corrected`, in order."""
        logs = self.log_decay
        if logs is None:
            one = k.new_ones(1, 1, 1, 1, 1).expand(*k.shape[:3], 1, 1)
            return [(x @ k.mT).tril_() for x in (q, k)], q, k, k, None, None, one
        if logs.dim() == 4:
            grams, befores, after, total = decayed(in_chunks(logs[:, part], length), [q, k], k)
            return grams, *befores, after, None, None, total.mT
        logs = in_chunks(logs[:, part, :, None], length).squeeze(-1)
        decay = Decays(exponential(logs))
        grams = [(x @ k.mT).tril_().mul_(decay.between) for x in (q, k)]
        return grams, q, k, k, decay.since, decay.until, decay.total


class _Corrected(NamedTuple):
    """Chunks by way of the corrected values w = beta (v - k . S).

    With S the state before a chunk and S' the one after,

        w = solved (v - k_before S),   y = q_before S + read w,   S' = total S + k_after^T w

    Attributes:
        solved: (B, H, C, T, T).
        read: (B, H, C, T, T).
        q_before: (B, H, C, T, N).
        k_before: (B, H, C, T, N).
        k_after: (B, H, C, T, N).
        since: factors (B, H, C, T, 1) on q_before and k_before; None for no factors.
        until: factors (B, H, C, T, 1) on k_after; None for no factors.
        total: (B, H, C, N or 1, 1).
    """

    solved: Tensor
    read: Tensor
    q_before: Tensor
    k_before: Tensor
    k_after: Tensor
    since: Tensor | None
    until: Tensor | None
    total: Tensor

    def forward(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Values (B, H, C, T, P) and the state before them (B H, N, P) to y and the state after."""
        w, before = torch.empty_like(v, memory_format=torch.contiguous_format), []
        v_of, w_of = map(_by_chunk, (v, w))
        solved, k_before, k_after, since, until, total = self._by_chunk()
        for c in range(v.shape[2]):
            before.append(state)
            missing = v_of[c] - _faded(times(k_before[c], state), since, c)
            w_here = w_of[c].copy_(times(solved[c], missing))
            written = times(k_after[c].mT, _faded(w_here, until, c))
            state = torch.addcmul(written, total[c], state)
        states = torch.stack(before, 1).view(*v.shape[:3], -1, v.shape[-1])
        read = times(self.q_before, states)
        read = read if self.since is None else read.mul_(self.since)
        return read.add_(times(self.read, w)), state

    def adjoint(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The adjoint of :meth:`forward`, from the last chunk to the first."""
        asked = times(self.read.mT, u)
        w = torch.empty_like(asked, memory_format=torch.contiguous_format)
        added = times(self.q_before.mT, u if self.since is None else self.since * u)
        asked_of, added_of, w_of = map(_by_chunk, (asked, added, w))
        solved, k_before, k_after, since, until, total = self._by_chunk()
        for c in reversed(range(u.shape[2])):
            asked_here = asked_of[c].add_(_faded(times(k_after[c], state), until, c))
            w_here = w_of[c].copy_(times(solved[c].mT, asked_here))
            kept = torch.addcmul(added_of[c], total[c], state)
            state = kept.sub_(times(k_before[c].mT, _faded(w_here, since, c)))
        return w, state

    def _by_chunk(self) -> Iterator[Sequence[Tensor]]:
        """What the steps from chunk to chunk need."""
        solved, k_before, k_after = self.solved, self.k_before, self.k_after
        return map(_by_chunk, (solved, k_before, k_after, self.since, self.until, self.total))


def _by_chunk(x: Tensor | None) -> Sequence[Tensor]:
    """The chunks of (B, H, C, ...), (B H, ...) each: views, all at once; none of no tensor."""
    return () if x is None else x.flatten(0, 1).unbind(1)


def _faded(x: Tensor, factors: Sequence[Tensor], c: int) -> Tensor:
    """Values (B H, T, P) of one chunk with their factor, if there are any."""
    return x * factors[c] if factors else x
