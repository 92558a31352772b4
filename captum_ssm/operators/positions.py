"""Query positions, and the unit vectors over tokens that ask for their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import QueryError

#: Query positions, common to all examples (a sequence of Q) or per example (a (B, Q) tensor).
Positions = Sequence[int] | Tensor

#: Elements of one stack of adjoint vectors in the generic row-by-row code (256 MiB in float32).
_STACK_ELEMENTS = 2**26


def per_example(positions: Positions, batch: int, tokens: int, device: torch.device) -> Tensor:
    """Positions, counted from either end, as tokens (B, Q)."""
    index = torch.as_tensor(positions, device=device)
    index = index.expand(batch, -1) if index.dim() == 1 else index
    if not index.numel() or bool(((index < -tokens) | (index >= tokens)).any()):
        raise QueryError(f"positions must lie in [{-tokens}, {tokens}), got {positions}.")
    return index % tokens


def in_stacks(rows: range, elements: int) -> Iterator[range]:
    """The rows in parts, as many at a time as a stack of vectors of so many elements holds."""
    size = max(1, _STACK_ELEMENTS // max(1, elements))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def by_query(positions: Positions, device: torch.device) -> Tensor:
    """Q positions ((Q,) or (Q, B)) as a tensor (Q, 1 or B)."""
    index = torch.as_tensor(positions, device=device)
    return index[:, None] if index.dim() == 1 else index


def at_positions(x: Tensor, positions: Positions) -> Tensor:
    """The entries of ``x`` (B, L, H, P), broadcastable, at Q positions, (Q, 1 or B, 1, H, P)."""
    if x.shape[1] == 1:
        return x[None]
    index = by_query(positions, x.device)
    return x[torch.arange(len(x), device=x.device), index][:, :, None]


def unit_vectors(positions: Positions, tokens: int, like: Tensor) -> Tensor:
    """For Q positions ((Q,) or (Q, B)) one at each and zero elsewhere, (Q, 1 or B, L, 1, 1)."""
    index = by_query(positions, like.device)
    token = torch.arange(tokens, device=like.device)
    return (token == index[..., None]).to(like.dtype)[..., None, None]
