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
    T tokens.
:gives: the chunks as matrices (:class:`.Chunk`).
:cost: 4 T^2 N + 4 T^3 / 3 + T N^2 multiplications with additions for a chunk and head.  If f is not
    k, 3 T^2 N + T^3 more.
:literature: Bischof and Van Loan, The WY Representation for Products of Householder Matrices, 1987;
    Joffrain et al., Accumulating Householder Transformations, Revisited, 2006, for the UT form;
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024,
    for chunks of DeltaNet; Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025,
    for two keys.  Inverses are computed by halves: Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., 2002, chapter 14.
:naive version: ``token_loops.delta_rule``
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import exponential
from .chunks import Chunk
from .within_chunk import Decays, decayed_by_logs


def delta_chunk(
    tokens: slice,
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    subtract: Tensor | None,
    log_decay: Tensor | None,
    decayed: bool = False,
) -> Chunk:
    """Return the chunks of a delta rule, after solving their triangular systems.

    If k is f, w = (I + e_gram)^-1 (v - e_since S) and y = q_gram w + q_since S.  Here q_gram is
    tril(Q F^T . E), e_gram is tril(e F^T . E', -1), and "since" are decays from the chunk's start.

    Args:
        tokens: slice of the tokens of all chunks.
        query: q (B, H, C, T, N).
        key: k times the step sizes (B, H, C, T, N).
        erase: e (B, H, C, T, N), without the decay if ``decayed``.
        subtract: f (B, H, C, T, N); None if f is ``key``.
        log_decay: logarithms of the decays, per head (B, H, C, T, 1) or per key channel
            (B, H, C, T, N); None for no decay.
        decayed: whether e is ``erase`` times the decay, so that ``erase`` reads the decayed state.
            Default: False.
    """
    # by_column: for f, then for k if k is not f: its products with q and with e, each times the
    # decays between, and f (or k) times the decays until the chunk's end
    columns = [key] if subtract is None else [subtract, key]
    if log_decay is None:
        by_column = [((query @ x.mT).tril_(), (erase @ x.mT).tril_(-1), x) for x in columns]
        q_since, e_since, total = query, erase, key.new_ones(1, 1, 1, 1, 1)
    elif log_decay.shape[-1] > 1:
        # e reads the state before a token's decay, like a query of the token before
        by_column = []
        rows = [query, erase if decayed else F.pad(erase, (0, 0, -1, 1))]
        for x in columns:
            (q_gram, e_gram), (q_since, e_since), until, total = decayed_by_logs(log_decay, rows, x)
            by_column.append((q_gram, e_gram if decayed else _next_row(e_gram), until))
        if not decayed:
            e_since = torch.cat([erase[..., :1, :], e_since[..., :-1, :]], -2)
        total = total.mT
    else:
        decay = Decays(exponential(log_decay.squeeze(-1)))
        between = decay.between if decayed else _next_row(decay.between)
        by_column = [
            (
                (query @ x.mT).tril_().mul_(decay.between),
                (erase @ x.mT).tril_(-1).mul_(between),
                x * decay.until,
            )
            for x in columns
        ]
        since, total = decay.since, decay.total
        before = since if decayed else torch.cat([torch.ones_like(total), since[..., :-1, :]], -2)
        q_since, e_since = query * since, erase * before
    q_gram, e_gram, f_until = by_column[0]
    # w[i] depends on earlier w: a triangular system, whose inverse is in each factor below
    inverse = unit_lower_inverse(e_gram)
    within, writes = q_gram @ inverse, inverse.mT @ f_until
    reads = q_since - within @ e_since
    carry = (writes.mT @ e_since).neg_()
    carry.diagonal(dim1=-2, dim2=-1).add_(total.squeeze(-1))
    if subtract is not None:  # values enter by k, not by f
        q_gram, e_gram, k_until = by_column[1]
        minus_gram = e_gram.tril(-1).neg_()
        within, writes = q_gram + within @ minus_gram, k_until + minus_gram.mT @ writes
    return Chunk(tokens, within, reads, writes, carry)


def _next_row(x: Tensor) -> Tensor:
    """Move each row of matrices down by one; the first row becomes zero."""
    return F.pad(x, (0, 0, 1, -1))


#: Matrices of up to this size are inverted directly.
_ROWS = 8


def unit_lower_inverse(x: Tensor) -> Tensor:
    """Invert lower-triangular matrices (..., T, T) with ones on the diagonal, by halves.

    Only the entries of ``x`` below the diagonal are read.
    """
    half, odd = divmod(x.shape[-1], 2)
    if odd or half * 2 <= _ROWS:
        one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
        inverse: Tensor = torch.linalg.solve_triangular(x, one, upper=False, unitriangular=True)
        return inverse
    out = torch.zeros_like(x)
    first, second = slice(half), slice(half, None)
    # the inverse of [[a, 0], [c, b]] is [[a', 0], [-b' c a', b']], with the inverses a' and b'
    blocks = torch.stack([x[..., s, s] for s in (first, second)])
    a_inverse, b_inverse = unit_lower_inverse(blocks).unbind()
    out[..., first, first], out[..., second, second] = a_inverse, b_inverse
    out[..., second, first] = (b_inverse @ x[..., second, first] @ a_inverse).neg_()
    return out
