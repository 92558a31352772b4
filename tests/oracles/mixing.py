"""How tokens are mixed, found by looking at matrices for several inputs.

Nothing here asks the package: a class of theorem 1 of the hidden-attention paper is read off the
matrices alone.  Fixed: they do not change.  Gated, diag(r) F diag(w): the ratios of two of them
have rank one, and the factors of a token follow from that token.  Controlled: anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Data (B, L, E) to the matrices of every channel (B, C, L, L), both in float64.
Matrices = Callable[[Tensor], Tensor]

TOKENS = 9
#: Differences and entries up to this are rounding errors; what changes, changes by far more.
NOTHING, SOMETHING = 1e-9, 1e-4


@dataclass(frozen=True)
class Observed:
    """What the matrices show.

    Attributes:
        mixes: whether there is anything beside the diagonal.
        changes: whether they change with the data.
        rescaled: whether they are all one matrix between two diagonals.
        local: whether a token's data shows in its own row and column only.
    """

    mixes: bool
    changes: bool
    rescaled: bool
    local: bool

    @property
    def word(self) -> str:
        if not self.mixes:
            return "none"
        if not self.changes:
            return "fixed"
        return "gated" if self.rescaled and self.local else "controlled"


def observe(matrices: Matrices, draw: Callable[[], Tensor]) -> Observed:
    """Look at the matrices for two random inputs, and for one that differs in a single token.

    Args:
        matrices: the matrices at given data.
        draw: random data (B, TOKENS, E).
    """
    data, token = draw(), 3
    touched = data.clone()
    touched[:, token] = draw()[:, token]
    one, other, nearby = matrices(data), matrices(draw()), matrices(touched)
    scale = one.abs().max()
    elsewhere = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    elsewhere[token] = False
    elsewhere[:, token] = False
    beside = ~torch.eye(TOKENS, dtype=torch.bool)
    return Observed(
        mixes=_clear(one.abs() / scale * beside),
        changes=_clear((one - other).abs() / scale),
        rescaled=not _clear(_rank_one_error(one, other)),
        local=not _clear((one - nearby).abs() / scale * elsewhere),
    )


def _clear(differences: Tensor) -> bool:
    """Whether there is a difference; neither a rounding error nor a change is in between."""
    largest = float(differences.max())
    assert not NOTHING < largest < SOMETHING, f"neither equal nor different: {largest:.1e}"
    return largest >= SOMETHING


def _rank_one_error(one: Tensor, other: Tensor) -> Tensor:
    """The 2 x 2 minors of other / one, as relative differences without a division.

    r[i, j] r[k, l] = r[i, l] r[k, j] for all rows i, k and columns j, l, where r = other / one.
    """
    straight = _minors(other, one)
    crossed = _minors(one, other)
    size = torch.maximum(straight.abs(), crossed.abs())
    small = size <= 1e-8 * float(size.max())  # entries far below the others are rounded badly
    return ((straight - crossed).abs() / size).masked_fill(small, 0)


def _minors(a: Tensor, b: Tensor) -> Tensor:
    """a[i, j] a[k, l] b[i, l] b[k, j], (B, C, L, L, L, L)."""
    return torch.einsum("bcij,bckl,bcil,bckj->bcijkl", a, a, b, b)
