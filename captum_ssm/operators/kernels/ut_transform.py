"""Delta rules within chunks by the UT transform of products of Householder-like updates.

    S[t] = decay[t] S[t-1] - f[t] (e[t] . S[t-1]) + k[t] v[t],   y[t] = q[t] . S[t]

Each step multiplies the state by diag(decay) - f e^T.  A product of T such matrices is a diagonal
one less a sum of T outer products (the WY representation), whose factors solve one triangular
system.  E being the products of decays between tokens, and E' those of the tokens before, what a
chunk finds is u = (I + tril(e F^T . E', -1))^-1 (e . S + tril(e K^T . E', -1) v), and what it
writes k v - f u.  Where f is k that is k w with the corrected values w = v - u, for which the same
system gives w = (I + tril(e K^T . E', -1))^-1 (v - e . S).

:takes: q, k, e and f (B, H, C, T, N) and the decays' logarithms (B, H, C, T, 1 or N) of C chunks of
    T tokens; values (B, H, C, T, P).
:gives: the chunks as matrices (:class:`.Chunk`), or outputs and states by way of corrected values.
:cost: T^2 (N + T / 3) multiplications with additions for a chunk and head to set up; for values
    T P (T + 3 N), and one step from chunk to chunk.  Where f is not k, T^2 N and T P (T + N) more.
:literature: Bischof and Van Loan, The WY Representation for Products of Householder Matrices, 1987;
    Joffrain et al., Accumulating Householder Transformations, Revisited, 2006, for the UT form;
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024,
    for chunks of DeltaNet; Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025,
    for two keys.  Inverses are taken by halves: Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., 2002, chapter 14.
:naive version: ``token_loops.delta_rule``, ``kernels.unit_lower_inverse``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import exponential, matmul
from .chunks import Chunk, stack, unstack
from .within_chunk import Decays, decayed


class Keys(NamedTuple):
    """What values go by that are written along other keys than is erased.

    Attributes:
        asked: less what the tokens find of each other's values, (B, H, C, T, T).
        read: (B, H, C, T, T).
        after: (B, H, C, T, N).
    """

    asked: Tensor
    read: Tensor
    after: Tensor


class Corrected(NamedTuple):
    """Chunks by way of the corrected values w.

    With S the state before a chunk and S' the one after,

        w = solved (v - e_before S),   y = q_before S + read w,   S' = total S + f_after^T w

    and where values are written along keys of their own,

        w = solved (own.asked v - e_before S),
        y = q_before S + read w + own.read v,   S' = total S + f_after^T w + own.after^T v

    Attributes:
        solved: (B, H, C, T, T).
        read: (B, H, C, T, T).
        q_before: (B, H, C, T, N).
        e_before: (B, H, C, T, N).
        f_after: (B, H, C, T, N).
        since: factors (B, H, C, T, 1) on q_before; None for no factors.
        ahead: factors (B, H, C, T, 1) on e_before; None for no factors.
        until: factors (B, H, C, T, 1) on f_after and own.after; None for no factors.
        total: (B, H, C, N or 1, 1).
        own: of values that are written along keys of their own; None for those along f.
    """

    solved: Tensor
    read: Tensor
    q_before: Tensor
    e_before: Tensor
    f_after: Tensor
    since: Tensor | None
    ahead: Tensor | None
    until: Tensor | None
    total: Tensor
    own: Keys | None

    def chunk(self, tokens: slice) -> Chunk:
        """The same as matrices."""
        q_before, e_before, f_after = (
            x if factors is None else x * factors
            for x, factors in (
                (self.q_before, self.since),
                (self.e_before, self.ahead),
                (self.f_after, self.until),
            )
        )
        within, writes = self.read @ self.solved, self.solved.mT @ f_after
        reads = q_before - within @ e_before
        carry = (writes.mT @ e_before).neg_()
        carry.diagonal(dim1=-2, dim2=-1).add_(self.total.squeeze(-1))
        if self.own is not None:
            asked, read, after = self.own
            within = read + within @ asked
            writes = (after if self.until is None else after * self.until) + asked.mT @ writes
        return Chunk(tokens, within, reads, writes, carry)

    def forward(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Values (B, H, C, T, P) and the state before them (B H, N, P) to y and the state after."""
        w, before = torch.empty_like(v, memory_format=torch.contiguous_format), []
        given = v if self.own is None else matmul(self.own.asked, v)
        given_of, w_of = map(_by_chunk, (given, w))
        solved, e_before, f_after, ahead, until, total = self._by_chunk()
        written_of = _by_chunk(self._written_by_themselves(v))
        for c in range(v.shape[2]):
            before.append(state)
            missing = given_of[c] - _faded(matmul(e_before[c], state), ahead, c)
            w_here = w_of[c].copy_(matmul(solved[c], missing))
            written = matmul(f_after[c].mT, _faded(w_here, until, c))
            if written_of:
                written.add_(written_of[c])
            state = torch.addcmul(written, total[c], state)
        states = torch.stack(before, 1).view(*v.shape[:3], -1, v.shape[-1])
        read = matmul(self.q_before, states)
        read = read if self.since is None else read.mul_(self.since)
        if self.own is not None:
            read.add_(matmul(self.own.read, v))
        return read.add_(matmul(self.read, w)), state

    def adjoint(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The adjoint of :meth:`forward`, from the last chunk to the first."""
        asked = matmul(self.read.mT, u)
        w = torch.empty_like(asked, memory_format=torch.contiguous_format)
        gained = matmul(self.q_before.mT, u if self.since is None else self.since * u)
        asked_of, gained_of, w_of = map(_by_chunk, (asked, gained, w))
        solved, e_before, f_after, ahead, until, total = self._by_chunk()
        after = []
        for c in reversed(range(u.shape[2])):
            after.append(state)
            asked_here = asked_of[c].add_(_faded(matmul(f_after[c], state), until, c))
            w_here = w_of[c].copy_(matmul(solved[c].mT, asked_here))
            kept = torch.addcmul(gained_of[c], total[c], state)
            state = kept.sub_(matmul(e_before[c].mT, _faded(w_here, ahead, c)))
        if self.own is None:
            return w, state
        states = torch.stack(after[::-1], 1).view(*u.shape[:3], -1, u.shape[-1])
        later = matmul(self.own.after, states)
        later = later if self.until is None else later.mul_(self.until)
        later.add_(matmul(self.own.read.mT, u)).add_(matmul(self.own.asked.mT, w))
        return later, state

    def _written_by_themselves(self, v: Tensor) -> Tensor | None:
        """What values leave in the state after their chunk by keys of their own."""
        if self.own is None:
            return None
        return matmul(self.own.after.mT, v if self.until is None else self.until * v)

    def _by_chunk(self) -> Iterator[Sequence[Tensor]]:
        """What the steps from chunk to chunk need."""
        solved, e_before, f_after = self.solved, self.e_before, self.f_after
        return map(_by_chunk, (solved, e_before, f_after, self.ahead, self.until, self.total))


def corrected(
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    taken: Tensor | None,
    log_decay: Tensor | None,
    late: bool = False,
) -> Corrected:
    """The chunks of a delta rule.

    Args:
        query: q (B, H, C, T, N).
        key: k, along which values are written, with their steps (B, H, C, T, N).
        erase: e, by which states are asked before their decay (B, H, C, T, N); or after it.
        taken: f, along which what is found is taken away (B, H, C, T, N); None for the key.
        log_decay: logarithms of the decays, per head (B, H, C, T, 1) or per key channel
            (B, H, C, T, N); None for no decay.
        late: whether states are asked after their decay, e being the decay times what they are
            asked by. Default: False.
    """
    since = ahead = until = None
    columns = [key] if taken is None else [taken, key]
    if log_decay is None:
        both = [((query @ x.mT).tril_(), (erase @ x.mT).tril_(-1), x) for x in columns]
        q_before, e_before = query, erase
        total = key.new_ones(1, 1, 1, 1, 1).expand(*key.shape[:3], 1, 1)
    elif log_decay.shape[-1] > 1:
        # what is asked before a token's decay is what the token before would read by that key
        rows, both = [query, erase if late else F.pad(erase, (0, 0, -1, 1))], []
        for x in columns:
            (read, gram), (q_before, e_before), after, total = decayed(log_decay, rows, x)
            both.append((read, gram if late else _next_row(gram), after))
        if not late:
            e_before = torch.cat([erase[..., :1, :], e_before[..., :-1, :]], -2)
        total = total.mT
    else:
        decay = Decays(exponential(log_decay.squeeze(-1)))
        before = decay.between if late else _next_row(decay.between)
        both = [
            ((query @ x.mT).tril_().mul_(decay.between), (erase @ x.mT).tril_(-1).mul_(before), x)
            for x in columns
        ]
        q_before, e_before = query, erase
        since, until, total = decay.since, decay.until, decay.total
        ahead = since if late else torch.cat([torch.ones_like(total), since[..., :-1, :]], -2)
    read, gram, after = both[0]
    own = None
    if taken is not None:
        own_read, asked, own_after = both[1]
        own = Keys(asked.tril(-1).neg_(), own_read, own_after)
    # w[i] depends on the w before it: a triangular system, of ones on the diagonal
    solved = unit_lower_inverse(gram)
    return Corrected(solved, read, q_before, e_before, after, since, ahead, until, total, own)


def _next_row(x: Tensor) -> Tensor:
    """Each row of matrices in the place of the next, the first being zero."""
    return F.pad(x, (0, 0, 1, -1))


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
            self.state = x.new_zeros(x.shape[:2].numel(), it.e_before.shape[-1], x.shape[-1])
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
