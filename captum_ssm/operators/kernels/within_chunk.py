"""Products of decays in short runs of tokens, by recursive doubling, and sums of such products.

    between[i, j] = product of a[t] over j < t <= i
    M[i, j] = sum over k of U[i, k] (product of A[t, k] over j < t <= i) V[j, k],   j <= i

Recursive doubling computes a product of 2 n factors from two known products of n factors.
M is computed from runs of one token, which are joined in pairs, level by level.

Every product is computed from factors that are at most one, never as a quotient of products or as
an exponential of a difference of sums of logarithms.  So a decay may be exactly zero.

:takes: decays a (..., T), or A (..., T, K) with one or several row factors U and column factors V
    (..., T, K).
:gives: ``between`` or M (..., T, T), row factors times the decays since the first token, and column
    factors times the decays until the last.
:cost: T^2 multiplications in log T calls for a run's products; T^2 K / 2 multiplications with
    additions for its sums, and T K log T for scaling the factors.
:literature: Kogge and Stone, A Parallel Algorithm for the Efficient Solution of a General Class of
    Recurrence Equations, 1973, for doubling; Yang et al., Gated Linear Attention Transformers with
    Hardware-Efficient Training, 2024, for sums that split chunks again to keep decays apart.
:naive version: ``kernels.decays_between``, ``kernels.semiseparable``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import exponential

# --- products of decays ------------------------------------------------------------------------


class Decays:
    """Products of decays in runs of T tokens.

    Attributes:
        between: product of decays j+1..i in row i and column j (..., T, T); arbitrary values of at
            most 1 if j > i.  Rows share memory, so do not write to this tensor.
        since: products of decays from the first token to each token, inclusive (..., T, 1).
        until: products of the decays after each token (..., T, 1).
        total: products of the decays of all tokens (..., 1, 1).

    Args:
        decay: the decays (..., T), at most 1.
    """

    def __init__(self, decay: Tensor) -> None:
        self.between = _decays_between(decay)
        self.since = self.between[..., :1] * decay[..., :1, None]
        self.until = self.between[..., -1, :, None]
        self.total = self.since[..., -1:, :]


def _decays_between(decay: Tensor) -> Tensor:
    """Return the product of decay[t] over j < t <= i in row i and column j, (..., T, T).

    Each step multiplies two known products to get products of up to twice as many factors.
    """
    tokens = decay.shape[-1]
    last = tokens - 1
    # row i, from right to left: the products of the last 0, 1, 2, ... decays up to i
    products = decay.new_zeros(*decay.shape, tokens)
    products[..., last] = 1
    products[..., 1:, last - 1 : last] = decay[..., 1:, None]
    known = 1  # how many products each row has, besides the empty one
    while known < last:
        new = min(known, last - known)
        first_known = last - known
        torch.mul(
            products[..., known:, first_known : first_known + 1],
            products[..., :-known, last - new : last],
            out=products[..., known:, first_known - new : first_known],
        )
        known += new
    # a row stride of T - 1 moves row i to the left by T - 1 - i entries
    strides = *products.stride()[:-2], max(1, last), 1
    return products.as_strided(products.shape, strides, last)


# --- sums of products with row and column factors ----------------------------------------------


class Decayed(NamedTuple):
    """The matrices M of runs of T tokens, and row and column factors times decays.

    Attributes:
        grams: the matrix M for each of the row factors, each (..., T, T).
        reads: each of the row factors times the decays up to and including its token (..., T, K).
        writes: column factors times the decays after their token (..., T, K).
        total: products of all decays (..., 1, K).
    """

    grams: list[Tensor]
    reads: list[Tensor]
    writes: Tensor
    total: Tensor


def decayed_by_logs(log_decay: Tensor, rows: Sequence[Tensor], columns: Tensor) -> Decayed:
    """Return products of row factors, column factors and the decays between their tokens.

    Args:
        log_decay: logarithms of the decays, at most 0: one per head (..., T, 1), or per head and
            key channel (..., T, N).
        rows: one or several row factors, each (..., T, N).
        columns: column factors (..., T, N).
    """
    if log_decay.shape[-1] > 1:
        # copies, which are overwritten
        return decayed_grams(exponential(log_decay), [x.clone() for x in rows], columns.clone())
    decay = Decays(exponential(log_decay).squeeze(-1))
    return Decayed(
        grams=[(x @ columns.mT).tril_().mul_(decay.between) for x in rows],
        reads=[x * decay.since for x in rows],
        writes=columns * decay.until,
        total=decay.total,
    )


def decayed_grams(decay: Tensor, rows: Sequence[Tensor], columns: Tensor) -> Decayed:
    """Return M for each of several row factors U and the same V, and the factors times decays.

    Runs of 1, 2, 4, ... tokens are joined in pairs.  U and V are overwritten.

    Args:
        decay: decays A (..., T, K), between 0 and 1.
        rows: row factors U, each (..., T, K).
        columns: column factors V (..., T, K).
    """
    lead, (tokens, width), count = decay.shape[:-2], decay.shape[-2:], len(rows)
    padded = 1 << (tokens - 1).bit_length()

    def as_single_tokens(x: Tensor, value: float = 0.0) -> Tensor:
        """Return ``x`` (..., T, K) as runs of one token, padded with ``value``."""
        x = x if tokens == padded else F.pad(x, (0, 0, 0, padded - tokens), value=value)
        return x.reshape(-1, x.shape[-1] // width, width)

    total, writes = as_single_tokens(decay, 1.0), as_single_tokens(columns)
    reads = as_single_tokens(rows[0] if count == 1 else torch.stack(tuple(rows), -2).flatten(-2))
    within = torch.bmm(reads, writes.mT)
    reads *= total
    while len(total) > lead.numel():
        within, reads, writes, total = _join_pairs(within, reads, writes, total)

    def unpadded(x: Tensor) -> Tensor:
        """Drop the padding of ``x`` (runs, padded tokens, ...), and restore leading dimensions."""
        return torch.unflatten(x[:, :tokens], 0, lead)

    grams = within.view(-1, padded, count, padded)[..., :tokens]
    return Decayed(
        grams=[unpadded(gram) for gram in grams.unbind(2)],
        reads=[unpadded(read) for read in reads.view(-1, padded, count, width).unbind(2)],
        writes=unpadded(writes),
        total=total.view(*lead, 1, width),
    )


def _join_pairs(
    within: Tensor, reads: Tensor, writes: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join neighboring runs in pairs; return the same four tensors of the joined runs.

    Args:
        within: matrices M of the runs (runs, T R, T).
        reads: row factors times the decays since the run's first token (runs, T R, K); overwritten.
        writes: column factors times the decays until its last token (runs, T, K); overwritten.
        total: products of the decays of each run (runs, 1, K).
    """
    rows, columns = within.shape[1:]
    out = within.new_empty(len(within) // 2, 2 * rows, 2 * columns)
    out[:, :rows, columns:] = 0
    out[:, :rows, :columns], out[:, rows:, columns:] = within[::2], within[1::2]
    # rows of the second runs, columns of the first, and the decays of both
    second, first, before, after = reads[1::2], writes[::2], total[::2], total[1::2]
    out[:, rows:, :columns] = torch.bmm(second, first.mT)
    second *= before  # views: this updates ``reads`` and ``writes``
    first *= after
    pairs = len(out)
    return out, reads.view(pairs, 2 * rows, -1), writes.view(pairs, 2 * columns, -1), before * after
