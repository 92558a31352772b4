"""Sums of semiseparable matrices by a tree of pivots.

The lower-triangular matrix

    M[i, j] = sum over k of U[i, k] (product of A[t, k] over j < t <= i) V[j, k]

is what every diagonal recurrence computes.  Splitting each block at a pivot turns everything left
of and below it into one matrix product of factors that only ever hold products of decays, each
at most as large as the longest product inside the block: no quotient of decays, no exponential of
a difference of cumulative sums, hence no overflow and no cancellation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

#: Leaves hold between half of this and this many tokens.
_LEAF = 8

Factors = tuple[Tensor, Tensor, Tensor]


def semiseparable_sum(blocks: Iterable[Factors], batch: int, tokens: int) -> Tensor:
    """The sum M over all blocks of channels, diagonal included, as (B, L, L).

    Args:
        blocks: yields decays A, row factors U and column factors V, each (B, L, K) for K of the
            channels; the tensors are overwritten.
        batch: B.
        tokens: L.
    """
    depth = 0
    while -(-tokens // 2**depth) > _LEAF:
        depth += 1
    leaf = -(-tokens // 2**depth)
    padded = leaf * 2**depth
    levels: list[Tensor] | None = None
    for decay, u, v in blocks:
        factors = [_to_leaves(x, leaf, padded) for x in (decay, u, v)]
        tiles = list(_tiles(factors[0], factors[1], factors[2], depth))
        if levels is None:
            levels = tiles
        else:
            for total, tile in zip(levels, tiles, strict=True):
                total += tile
    if levels is None:
        raise ValueError("semiseparable_sum needs at least one block")
    return _assemble(levels, batch, leaf, padded)[:, :tokens, :tokens].contiguous()


def _to_leaves(x: Tensor, leaf: int, padded: int) -> Tensor:
    """(B, L, K) to (B * leaves, leaf, K), padded with zeros."""
    batch, tokens, width = x.shape
    if padded > tokens:
        x = torch.nn.functional.pad(x, (0, 0, 0, padded - tokens))
    return x.reshape(batch * (padded // leaf), leaf, width)


def _tiles(decay: Tensor, u: Tensor, v: Tensor, depth: int) -> Iterator[Tensor]:
    """The diagonal tiles of the leaves, then at each level the tiles below the pivots."""
    leaves, leaf, width = decay.shape
    tile = decay.new_zeros(leaves, leaf, leaf)
    # Within a leaf: column factors decay token by token; in the end they reach the leaf's end
    # and the row factors its beginning, which is what the first level needs.
    total = torch.ones_like(decay[:, 0])
    for i in range(leaf):
        v[:, :i] *= decay[:, i : i + 1]
        tile[:, i, : i + 1] = torch.bmm(v[:, : i + 1], u[:, i, :, None]).squeeze(-1)
        total = total * decay[:, i]
        u[:, i] *= total
    yield tile
    span = leaf
    for _ in range(depth):
        u, v = u.view(-1, 2, span, width), v.view(-1, 2, span, width)
        total = total.view(-1, 2, 1, width)
        yield torch.bmm(u[:, 1], v[:, 0].transpose(1, 2))
        u[:, 1] *= total[:, 0]
        v[:, 0] *= total[:, 1]
        total = total[:, 0] * total[:, 1]
        span *= 2


def _assemble(levels: list[Tensor], batch: int, leaf: int, padded: int) -> Tensor:
    out = levels[0].new_zeros(batch, padded, padded)
    side = leaf
    for level, tiles in enumerate(levels):
        # the k-th tile of this level starts at row k * step + below, column k * step
        below, step = (0, leaf) if level == 0 else (side, 2 * side)
        place = out.as_strided(
            (batch, padded // step, side, side),
            (padded * padded, step * (padded + 1), padded, 1),
            below * padded,
        )
        place.copy_(tiles.view(batch, -1, side, side))
        side = side if level == 0 else 2 * side
    return out
