"""Products of decays in short runs of tokens, by recursive doubling, and sums of such products.

    between[i, j] = product of a[t] over j < t <= i
    M[i, j] = sum over k of U[i, k] (product of A[t, k] over j < t <= i) V[j, k],   j <= i

Recursive doubling computes a product of 2 n factors from two known products of n factors.
M uses the tree of :mod:`.pivot_tree`, here from leaves of a few tokens, for hundreds of short runs
together instead of one long run.

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
        self.between = _between(decay)
        self.since = self.between[..., :1] * decay[..., :1, None]
        self.until = self.between[..., -1, :, None]
        self.total = self.since[..., -1:, :]


def _between(decay: Tensor) -> Tensor:
    """Return the product of decay[t] over j < t <= i in row i and column j, (..., T, T).

    Each step multiplies two known products to get products of up to twice as many factors.
    """
    tokens = decay.shape[-1]
    last = tokens - 1
    # row i, from right to left: the products of the last 0, 1, 2, ... decays up to i
    products = decay.new_zeros(*decay.shape, tokens)
    products[..., last] = 1
    products[..., 1:, last - 1 : last] = decay[..., 1:, None]
    known = 1
    while known < last:
        more = min(known, last - known)
        end = last - known
        torch.mul(
            products[..., known:, end : end + 1],
            products[..., :-known, last - more : last],
            out=products[..., known:, end - more : end],
        )
        known += more
    # move each row to the left by its distance from the last row
    rows = *products.stride()[:-2], max(1, last), 1
    return products.as_strided(products.shape, rows, last)


# --- sums of products with row and column factors ----------------------------------------------

#: Largest number of tokens of a leaf of the tree; the smallest is about half of it.
_LEAF = 8


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


def decayed(log_decay: Tensor, rows: Sequence[Tensor], columns: Tensor) -> Decayed:
    """Return products of row factors, column factors and the decays between their tokens.

    Args:
        log_decay: logarithms of the decays, at most 0: one per head (..., T, 1), or per head and
            key channel (..., T, N).
        rows: one or several row factors, each (..., T, N).
        columns: column factors (..., T, N).
    """
    if log_decay.shape[-1] > 1:
        return decayed_grams(exponential(log_decay), rows, columns)
    decay = Decays(exponential(log_decay).squeeze(-1))
    return Decayed(
        [(x @ columns.mT).tril_().mul_(decay.between) for x in rows],
        [x * decay.since for x in rows],
        columns * decay.until,
        decay.total,
    )


def decayed_grams(decay: Tensor, rows: Sequence[Tensor], columns: Tensor) -> Decayed:
    """Return M for each of several row factors U and the same V, and the factors times decays.

    Args:
        decay: decays A (..., T, K), between 0 and 1.
        rows: row factors U, each (..., T, K).
        columns: column factors V (..., T, K).
    """
    lead, (tokens, width) = decay.shape[:-2], decay.shape[-2:]
    depth = max(0, (-(-tokens // _LEAF) - 1).bit_length())
    span = -(-tokens // 2**depth)
    padded, kinds, runs = span * 2**depth, len(rows), lead.numel()
    # copies, which are written to
    a = _in_leaves(decay, span, padded, value=1.0)
    u = _in_leaves(torch.stack(tuple(rows), -2).flatten(-2), span, padded)
    v = _in_leaves(columns, span, padded)
    out = a.new_zeros(runs, padded, kinds, padded)
    total = _leaves(a, u.view(-1, span, kinds, width), v, _tiles(out, span, row=0, step=span))
    for _ in range(depth):
        first = v.view(-1, 2, span, width)[:, 0]  # (pairs, span, K)
        second = u.view(-1, 2, span * kinds, width)[:, 1]  # (pairs, span R, K)
        tiles = _tiles(out, span, row=span, step=2 * span)
        tiles.copy_((second @ first.mT).view(tiles.shape))
        of_first, of_second = total.view(-1, 2, 1, width).unbind(1)
        second *= of_first
        first *= of_second
        total, span = of_first * of_second, 2 * span

    def of_runs(x: Tensor) -> Tensor:
        return torch.unflatten(x[:, :tokens], 0, lead)

    return Decayed(
        [of_runs(gram) for gram in out[..., :tokens].unbind(2)],
        [of_runs(read) for read in u.view(runs, padded, kinds, width).unbind(2)],
        of_runs(v.view(runs, padded, width)),
        total.view(*lead, 1, width),
    )


def _in_leaves(x: Tensor, leaf: int, padded: int, value: float = 0.0) -> Tensor:
    """Copy ``x`` (..., T, K) to leaves (leaves, leaf, K), padded with ``value``."""
    x = F.pad(x, (0, 0, 0, padded - x.shape[-2]), value=value)
    return x.reshape(-1, leaf, x.shape[-1])


def _leaves(a: Tensor, u: Tensor, v: Tensor, tiles: Tensor) -> Tensor:
    """Write the tiles on the diagonal, token by token, and multiply the factors by decays.

    Afterwards the row factors include the decays since the leaf's first token, and the column
    factors the decays until the leaf's last token, as joining leaves requires.

    Args:
        a: decays (leaves, T, K).
        u: row factors (leaves, T, R, K), overwritten.
        v: column factors (leaves, T, K), overwritten.
        tiles: the tiles to write (runs, leaves of a run, T, R, T).

    Returns:
        The product of the decays of each leaf, (leaves, 1, K).
    """
    total = torch.ones_like(a[:, :1])
    for i in range(a.shape[1]):
        decay = a[:, i : i + 1]
        v[:, :i] *= decay
        row = u[:, i] @ v[:, : i + 1].mT  # (leaves, R, i + 1)
        tiles[:, :, i, :, : i + 1] = row.view(*tiles.shape[:2], *row.shape[1:])
        total = total * decay
        u[:, i] *= total
    return total


def _tiles(out: Tensor, side: int, row: int, step: int) -> Tensor:
    """View tiles of matrices (runs, T, R, T), every ``step`` tokens, ``row`` below the diagonal.

    Returns:
        A view (runs, tiles, side, R, side).
    """
    runs, tokens, kinds, _ = out.shape
    along = kinds * tokens  # from one row to the next
    return out.as_strided(
        (runs, tokens // step, side, kinds, side),
        (tokens * along, step * (along + 1), along, tokens, 1),
        row * along,
    )
