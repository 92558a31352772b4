"""The delta rule within chunks by the UT transform of products of Householder-like updates.

    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   y[t] = q[t] . S[t]

Each step multiplies the state by I - beta k k^T.  A product of T such matrices is a sum of T outer
products (the WY representation), whose factors solve one triangular system: the corrected values
w = beta (v - k . S) of a chunk are (I + tril(beta K K^T . E, -1))^-1 diag(beta) times what its
values lack, E being the products of decays between tokens.

:takes: q and k (B, H, C, T, N), beta (B, H, C, T, 1) and the decays' logarithms (B, H, C, T, 1 or
    N) of C chunks of T tokens; values (B, H, C, T, P).
:gives: the chunks as matrices (:class:`.Chunk`), or outputs and states by way of corrected values.
:cost: T^2 (N + T / 3) multiplications with additions for a chunk and head to set up; for values
    T P (T + 3 N), and one step from chunk to chunk.
:literature: Bischof and Van Loan, The WY Representation for Products of Householder Matrices, 1987;
    Joffrain et al., Accumulating Householder Transformations, Revisited, 2006, for the UT form;
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024,
    for chunks of DeltaNet.  Inverses are taken by halves: Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., 2002, chapter 14.
:naive version: ``token_loops.delta_rule``, ``kernels.unit_lower_inverse``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import exponential, matmul
from .chunks import Chunk, stack, unstack
from .within_chunk import Decays, decayed


class Corrected(NamedTuple):
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

    def chunk(self, tokens: slice) -> Chunk:
        """The same as matrices.

        Args:
            tokens: which they are.
        """
        q_before, k_before, k_after = self.q_before, self.k_before, self.k_after
        if self.since is not None and self.until is not None:
            q_before, k_before, k_after = (
                q_before * self.since,
                k_before * self.since,
                k_after * self.until,
            )
        inner, writes = self.read @ self.solved, self.solved.mT @ k_after
        reads = q_before - inner @ k_before
        carry = (writes.mT @ k_before).neg_()
        carry.diagonal(dim1=-2, dim2=-1).add_(self.total.squeeze(-1))
        return Chunk(tokens, inner, reads, writes, carry)

    def forward(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Values (B, H, C, T, P) and the state before them (B H, N, P) to y and the state after."""
        w, before = torch.empty_like(v, memory_format=torch.contiguous_format), []
        v_of, w_of = map(_by_chunk, (v, w))
        solved, k_before, k_after, since, until, total = self._by_chunk()
        for c in range(v.shape[2]):
            before.append(state)
            missing = v_of[c] - _faded(matmul(k_before[c], state), since, c)
            w_here = w_of[c].copy_(matmul(solved[c], missing))
            written = matmul(k_after[c].mT, _faded(w_here, until, c))
            state = torch.addcmul(written, total[c], state)
        states = torch.stack(before, 1).view(*v.shape[:3], -1, v.shape[-1])
        read = matmul(self.q_before, states)
        read = read if self.since is None else read.mul_(self.since)
        return read.add_(matmul(self.read, w)), state

    def adjoint(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The adjoint of :meth:`forward`, from the last chunk to the first."""
        asked = matmul(self.read.mT, u)
        w = torch.empty_like(asked, memory_format=torch.contiguous_format)
        gained = matmul(self.q_before.mT, u if self.since is None else self.since * u)
        asked_of, gained_of, w_of = map(_by_chunk, (asked, gained, w))
        solved, k_before, k_after, since, until, total = self._by_chunk()
        for c in reversed(range(u.shape[2])):
            asked_here = asked_of[c].add_(_faded(matmul(k_after[c], state), until, c))
            w_here = w_of[c].copy_(matmul(solved[c].mT, asked_here))
            kept = torch.addcmul(gained_of[c], total[c], state)
            state = kept.sub_(matmul(k_before[c].mT, _faded(w_here, since, c)))
        return w, state

    def _by_chunk(self) -> Iterator[Sequence[Tensor]]:
        """What the steps from chunk to chunk need."""
        solved, k_before, k_after = self.solved, self.k_before, self.k_after
        return map(_by_chunk, (solved, k_before, k_after, self.since, self.until, self.total))


def corrected(query: Tensor, key: Tensor, beta: Tensor, log_decay: Tensor | None) -> Corrected:
    """The chunks of a delta rule.

    Args:
        query: (B, H, C, T, N).
        key: (B, H, C, T, N).
        beta: step sizes (B, H, C, T, 1).
        log_decay: logarithms of the decays, per head (B, H, C, T, 1) or per key channel
            (B, H, C, T, N); None for no decay.
    """
    since = until = None
    q_before, k_before, k_after = query, key, key
    if log_decay is None:
        read, gram = ((x @ key.mT).tril_() for x in (query, key))
        total = key.new_ones(1, 1, 1, 1, 1).expand(*key.shape[:3], 1, 1)
    elif log_decay.shape[-1] > 1:
        (read, gram), (q_before, k_before), k_after, total = decayed(log_decay, [query, key], key)
        total = total.mT
    else:
        decay = Decays(exponential(log_decay.squeeze(-1)))
        read, gram = ((x @ key.mT).tril_().mul_(decay.between) for x in (query, key))
        since, until, total = decay.since, decay.until, decay.total
    # w[i] depends on the w before it: a triangular system, of ones on the diagonal
    solved = unit_lower_inverse(gram.mul_(beta)).mul_(beta.mT)
    return Corrected(solved, read, q_before, k_before, k_after, since, until, total)


class CorrectedSteps:
    """The steps of a delta rule, for which the chunks' own matrices would cost more.

    Args:
        corrected_of: from some tokens, and how many a whole chunk has, to their chunks.
        length: tokens of a whole chunk.
        transposed: whether this is the adjoint, for which the last token comes first.
    """

    def __init__(
        self, corrected_of: Callable[[slice, int], Corrected], length: int, transposed: bool
    ) -> None:
        self.corrected_of = corrected_of
        self.length = length
        self.transposed = transposed
        self.state: Tensor | None = None

    def __call__(self, v: Tensor, part: slice, out: Tensor) -> None:
        it, x = self.corrected_of(part, self.length), stack(v, self.length)
        if self.state is None:
            self.state = x.new_zeros(x.shape[:2].numel(), it.k_before.shape[-1], x.shape[-1])
        step = it.adjoint if self.transposed else it.forward
        result, self.state = step(x, self.state)
        unstack(result, out)


def _by_chunk(x: Tensor | None) -> Sequence[Tensor]:
    """The chunks of (B, H, C, ...), (B H, ...) each: views, all at once; none of no tensor."""
    return () if x is None else x.flatten(0, 1).unbind(1)


def _faded(x: Tensor, factors: Sequence[Tensor], c: int) -> Tensor:
    """Values (B H, T, P) of one chunk with their factor, if there are any."""
    return x * factors[c] if factors else x


#: Sides up to which rows are as quick as products.
_ROWS = 8


def unit_lower_inverse(x: Tensor) -> Tensor:
    """The inverses of matrices (..., T, T) of ones on the diagonal and zeros above it.

    What ``x`` holds there is not read.

    Args:
        x: what is below the diagonal.
    """
    half, odd = divmod(x.shape[-1], 2)
    if odd or half * 2 <= _ROWS:
        one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
        found: Tensor = torch.linalg.solve_triangular(x, one, upper=False, unitriangular=True)
        return found
    out = torch.zeros_like(x)
    first, second = slice(half), slice(half, None)
    above, below = unit_lower_inverse(torch.stack([x[..., s, s] for s in (first, second)])).unbind()
    out[..., first, first], out[..., second, second] = above, below
    out[..., second, first] = (below @ x[..., second, first] @ above).neg_()
    return out
