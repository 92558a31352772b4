"""The delta rule with decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention.

    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   y[t] = q[t] . S[t]

Given q, k, beta and the decays this is linear in v; the matrix is
(Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), E the products of decays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .band import Band
from .base import Operator, Shape
from .chunked_heads import ChunkedHeads
from .chunks import Chunk, chunk_length, held, in_chunks, put, stacked
from .decays import Decays
from .grams import decayed
from .heads import common_to_channels
from .maps import full_precision
from .strips import Strip, total
from .underflow import underflow_flushed


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

    def strip_of_product(self, left: Tensor, band: Band, rows: range) -> Strip:
        left, *rights = (x.expand(self.shape) for x in (left, *band.values()))
        if any(common_to_channels(left, x, self.shape) is not None for x in rights):
            return super().strip_of_product(left, band, rows)
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            sums = self._sums_of_channels(left, rights, rows)
        strips = (Strip(entries, rows, range(rows.stop)) for entries in sums)
        tokens = self.shape.tokens
        shares = (x.moved(0, -lag, tokens) for lag, x in zip(band, strips, strict=True))
        return total(shares, rows)

    def _forward(self, v: Tensor) -> Tensor:
        return self._run(v, transposed=False)

    def _adjoint(self, u: Tensor) -> Tensor:
        return self._run(u, transposed=True)

    def _run(self, v: Tensor, transposed: bool) -> Tensor:
        """alpha v or its adjoint, by the corrected values: chunks' own matrices would cost more."""
        batch, tokens, heads, _ = self.shape
        length = chunk_length(v)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        state = self._zeros(batch * heads, self.key.shape[-1], v.shape[:-4].numel() * v.shape[-1])
        parts = list(held(range(tokens), length, batch * heads))
        for part in reversed(parts) if transposed else parts:
            it = self._corrected(part, length)
            x = stacked(v[..., part, :, :], length)
            result, state = it.adjoint(x, state) if transposed else it.forward(x, state)
            put(result, out[..., part, :, :])
        return out

    def _corrected(self, part: slice, length: int) -> _Corrected:
        q, k = (in_chunks(x[:, part], length) for x in (self.query, self.key))
        (read, corrected), *factors = self._decayed(q, k, part, length)
        beta = in_chunks(self.beta[:, part, :, None], length)  # (B, H, C, T, 1)
        # w[i] depends on the w before it: a triangular system, of ones on the diagonal
        solved = torch.linalg.solve_triangular(
            corrected.mul_(beta), torch.diag_embed(beta[..., 0]), upper=False, unitriangular=True
        )
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
        decay = Decays(in_chunks(logs[:, part, :, None], length).squeeze(-1).exp())
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
        w, before = self.solved @ v, []
        forgotten = self.solved if self.since is None else self.solved * self.since.mT
        for c in range(v.shape[2]):
            before.append(state)
            found = _at(self.k_before, c) @ state
            w_here = _at(w, c).baddbmm_(_at(forgotten, c), found, alpha=-1)
            kept = _at(self.total, c) * state
            state = kept.baddbmm_(_at(self.k_after, c).mT, _faded(w_here, self.until, c))
        read = self.q_before @ torch.stack(before, 1).view(*v.shape[:3], -1, v.shape[-1])
        read = read if self.since is None else read.mul_(self.since)
        return read.add_(self.read @ w), state

    def adjoint(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The adjoint of :meth:`forward`, from the last chunk to the first."""
        solved = self.solved.mT
        remembered = solved if self.until is None else solved * self.until.mT
        w = solved @ (self.read.mT @ u)
        added = self.q_before.mT @ (u if self.since is None else self.since * u)
        for c in reversed(range(u.shape[2])):
            found = _at(self.k_after, c) @ state
            w_here = _at(w, c).baddbmm_(_at(remembered, c), found)
            kept = torch.addcmul(_at(added, c), _at(self.total, c), state)
            faded = _faded(w_here, self.since, c)
            state = kept.baddbmm_(_at(self.k_before, c).mT, faded, alpha=-1)
        return w, state


def _at(x: Tensor, c: int) -> Tensor:
    """One chunk of (B, H, C, ...), (B H, ...): a view."""
    return x[:, :, c].flatten(0, 1)


def _faded(x: Tensor, factor: Tensor | None, c: int) -> Tensor:
    """Values (B H, T, P) of one chunk with their factor."""
    return x if factor is None else x * _at(factor, c)
