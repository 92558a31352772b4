"""Delta rules within chunks by the UT transform of products of Householder-like updates.

    S[t] = decay[t] S[t-1] - f[t] (e[t] . S[t-1]) + k[t] v[t],   y[t] = q[t] . S[t]

Each step multiplies the state by diag(decay) - f e^T.  A product of T such matrices is a diagonal
matrix minus a sum of T outer products (the WY representation), whose factors solve one triangular
system.  Let E[i, j] be the product of decays j+1..i, and E'[i, j] the product of decays j+1..i-1.
The readings e . S of a chunk's tokens are
u = (I + tril(e F^T . E', -1))^-1 (e . S + tril(e K^T . E', -1) v), and the chunk adds k v - f u to
the state.  If f is k, it adds k w with the *corrected values* w = v - u; the same system gives
w = (I + tril(e K^T . E', -1))^-1 (v - e . S).

:takes: q, k, e and f (B, H, C, T, N) and the decays' logarithms (B, H, C, T, 1 or N) of C chunks of
    T tokens; values (B, H, C, T, P).
:gives: the chunks as matrices (:class:`.Chunk`), or outputs and states from corrected values.
:cost: T^2 (N + T / 3) multiplications with additions for a chunk and head to set up; for values
    T P (T + 3 N), and one step from chunk to chunk.  If f is not k, T^2 N and T P (T + N) more.
:literature: Bischof and Van Loan, The WY Representation for Products of Householder Matrices, 1987;
    Joffrain et al., Accumulating Householder Transformations, Revisited, 2006, for the UT form;
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024,
    for chunks of DeltaNet; Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025,
    for two keys.  Inverses are computed by halves: Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., 2002, chapter 14.
:naive version: ``token_loops.delta_rule``
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
    """Products of the values' keys k in a chunk, for delta rules whose vectors f differ from k.

    Attributes:
        erased: minus the products of e and k with decays, below the diagonal (B, H, C, T, T).
        read: products of q and k with decays (B, H, C, T, T).
        after: k times decays until the chunk's end, without the factor ``until`` (B, H, C, T, N).
    """

    erased: Tensor
    read: Tensor
    after: Tensor


class Corrected(NamedTuple):
    """Chunks of a delta rule, in terms of corrected values w.

    With S the state before a chunk and S' the state after it,

        w = solved (v - e_before S),   y = q_before S + read w,   S' = total S + f_after^T w

    and if the values have separate keys k (f is not k),

        w = solved (own.erased v - e_before S),
        y = q_before S + read w + own.read v,   S' = total S + f_after^T w + own.after^T v

    Attributes:
        solved: inverse of the triangular system (B, H, C, T, T).
        read: products of q and f within the chunk (B, H, C, T, T).
        q_before: q times decays since the state before the chunk (B, H, C, T, N).
        e_before: e times decays since the state before the chunk (B, H, C, T, N).
        f_after: f times decays until the state after the chunk (B, H, C, T, N).
        since: decays (B, H, C, T, 1) that multiply q_before; None for no factors.
        before: decays (B, H, C, T, 1) that multiply e_before; None for no factors.
        until: decays (B, H, C, T, 1) that multiply f_after and own.after; None for no factors.
        total: decays of whole chunks (B, H, C, N or 1, 1).
        own: products of the values' keys k; None if k is f.
    """

    solved: Tensor
    read: Tensor
    q_before: Tensor
    e_before: Tensor
    f_after: Tensor
    since: Tensor | None
    before: Tensor | None
    until: Tensor | None
    total: Tensor
    own: Keys | None

    def chunk(self, tokens: slice) -> Chunk:
        """Return the chunks with explicit matrices, as a :class:`.Chunk`."""
        q_before, e_before, f_after = (
            x if factors is None else x * factors
            for x, factors in (
                (self.q_before, self.since),
                (self.e_before, self.before),
                (self.f_after, self.until),
            )
        )
        within, writes = self.read @ self.solved, self.solved.mT @ f_after
        reads = q_before - within @ e_before
        carry = (writes.mT @ e_before).neg_()
        carry.diagonal(dim1=-2, dim2=-1).add_(self.total.squeeze(-1))
        if self.own is not None:
            erased, read, after = self.own
            within = read + within @ erased
            writes = (after if self.until is None else after * self.until) + erased.mT @ writes
        return Chunk(tokens, within, reads, writes, carry)

    def forward(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs y of values ``v`` (B, H, C, T, P), and the state after all chunks."""
        w, states_before = torch.empty_like(v, memory_format=torch.contiguous_format), []
        known = v if self.own is None else matmul(self.own.erased, v)
        known_of, w_of = map(_by_chunk, (known, w))
        solved, e_before, f_after, before, until, total = self._by_chunk()
        written_of = _by_chunk(self._own_writes(v))
        for c in range(v.shape[2]):
            states_before.append(state)
            missing = known_of[c] - _faded(matmul(e_before[c], state), before, c)
            w_here = w_of[c].copy_(matmul(solved[c], missing))
            written = matmul(f_after[c].mT, _faded(w_here, until, c))
            if written_of:
                written.add_(written_of[c])
            state = torch.addcmul(written, total[c], state)
        states = torch.stack(states_before, 1).view(*v.shape[:3], -1, v.shape[-1])
        read = matmul(self.q_before, states)
        read = read if self.since is None else read.mul_(self.since)
        if self.own is not None:
            read.add_(matmul(self.own.read, v))
        return read.add_(matmul(self.read, w)), state

    def adjoint(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the adjoint of :meth:`forward`, from the last chunk to the first.

        ``w`` is the gradient of the right side of the triangular system that ``forward`` solves.
        """
        of_w = matmul(self.read.mT, u)
        w = torch.empty_like(of_w, memory_format=torch.contiguous_format)
        gained = matmul(self.q_before.mT, u if self.since is None else self.since * u)
        of_w_of, gained_of, w_of = map(_by_chunk, (of_w, gained, w))
        solved, e_before, f_after, before, until, total = self._by_chunk()
        states_after = []
        for c in reversed(range(u.shape[2])):
            states_after.append(state)
            of_w_here = of_w_of[c].add_(_faded(matmul(f_after[c], state), until, c))
            w_here = w_of[c].copy_(matmul(solved[c].mT, of_w_here))
            kept = torch.addcmul(gained_of[c], total[c], state)
            state = kept.sub_(matmul(e_before[c].mT, _faded(w_here, before, c)))
        if self.own is None:
            return w, state
        states = torch.stack(states_after[::-1], 1).view(*u.shape[:3], -1, u.shape[-1])
        out = matmul(self.own.after, states)
        out = out if self.until is None else out.mul_(self.until)
        out.add_(matmul(self.own.read.mT, u)).add_(matmul(self.own.erased.mT, w))
        return out, state

    def _own_writes(self, v: Tensor) -> Tensor | None:
        """Return own.after^T v for each chunk, or None if k is f."""
        if self.own is None:
            return None
        return matmul(self.own.after.mT, v if self.until is None else self.until * v)

    def _by_chunk(self) -> Iterator[Sequence[Tensor]]:
        """Return the factors that the loops over chunks use, each as a sequence over chunks."""
        solved, e_before, f_after = self.solved, self.e_before, self.f_after
        return map(_by_chunk, (solved, e_before, f_after, self.before, self.until, self.total))


def corrected(
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    taken: Tensor | None,
    log_decay: Tensor | None,
    late: bool = False,
) -> Corrected:
    """Set up the chunks of a delta rule, and solve their triangular systems.

    Args:
        query: q (B, H, C, T, N).
        key: k times the step sizes (B, H, C, T, N).
        erase: e (B, H, C, T, N), without the decay if ``late``.
        taken: f (B, H, C, T, N); None if f is ``key``.
        log_decay: logarithms of the decays, per head (B, H, C, T, 1) or per key channel
            (B, H, C, T, N); None for no decay.
        late: whether e is ``erase`` times the decay, so that ``erase`` reads the decayed state.
            Default: False.
    """
    # factors on q_before, e_before and after, only for decays per head
    since = before = until = None
    # both: for f, then for k if k is not f: the products with q and with e, and f (or k) times the
    # decays until the chunk's end, without the factor ``until``
    columns = [key] if taken is None else [taken, key]
    if log_decay is None:
        both = [((query @ x.mT).tril_(), (erase @ x.mT).tril_(-1), x) for x in columns]
        q_before, e_before = query, erase
        total = key.new_ones(1, 1, 1, 1, 1).expand(*key.shape[:3], 1, 1)
    elif log_decay.shape[-1] > 1:
        # e reads the state before a token's decay, like a query of the token before
        rows, both = [query, erase if late else F.pad(erase, (0, 0, -1, 1))], []
        for x in columns:
            (read, gram), (q_before, e_before), after, total = decayed(log_decay, rows, x)
            both.append((read, gram if late else _next_row(gram), after))
        if not late:
            e_before = torch.cat([erase[..., :1, :], e_before[..., :-1, :]], -2)
        total = total.mT
    else:
        decay = Decays(exponential(log_decay.squeeze(-1)))
        between = decay.between if late else _next_row(decay.between)
        both = [
            ((query @ x.mT).tril_().mul_(decay.between), (erase @ x.mT).tril_(-1).mul_(between), x)
            for x in columns
        ]
        q_before, e_before = query, erase
        since, until, total = decay.since, decay.until, decay.total
        before = since if late else torch.cat([torch.ones_like(total), since[..., :-1, :]], -2)
    read, gram, after = both[0]
    own = None
    if taken is not None:
        own_read, erased, own_after = both[1]
        own = Keys(erased.tril(-1).neg_(), own_read, own_after)
    # w[i] depends on earlier w: a triangular system with ones on the diagonal
    solved = unit_lower_inverse(gram)
    return Corrected(solved, read, q_before, e_before, after, since, before, until, total, own)


def _next_row(x: Tensor) -> Tensor:
    """Move each row of matrices down by one; the first row becomes zero."""
    return F.pad(x, (0, 0, 1, -1))


class CorrectedSteps:
    """Run a delta rule chunk by chunk with corrected values, without forming chunks' matrices.

    Args:
        corrected_of: function of a slice of tokens and the length of a whole chunk that returns the
            tokens' chunks.
        length: number of tokens of a whole chunk.
        transposed: whether to run the adjoint, from the last token to the first.
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
    """Return one view (B H, ...) for each chunk of ``x`` (B, H, C, ...); empty for None."""
    return () if x is None else x.flatten(0, 1).unbind(1)


def _faded(x: Tensor, factors: Sequence[Tensor], c: int) -> Tensor:
    """Return x * factors[c] for values ``x`` (B H, T, P) of chunk ``c``; ``x`` without factors."""
    return x * factors[c] if factors else x


#: Matrices of up to this size are inverted directly.
_ROWS = 8


def unit_lower_inverse(x: Tensor) -> Tensor:
    """Invert lower-triangular matrices (..., T, T) with ones on the diagonal, by halves.

    Only the entries of ``x`` below the diagonal are read.
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
