"""Matrices of single channels, some of them at a time, and what they reduce to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .reduction import Reduce

if TYPE_CHECKING:
    from .base import Operator

#: Elements of the matrices that exist at a time (64 MiB in float32), if they are not asked for.
_ELEMENTS = 2**24

#: Reductions that go pair by pair: over a dimension, and of two tensors.
_PAIRWISE: dict[Reduce, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "max": (torch.amax, torch.maximum),
    "min": (torch.amin, torch.minimum),
    "product": (torch.prod, torch.mul),
}


def goes_by_channel(operator: Operator, reduce: Reduce) -> bool:
    """Whether channel after channel is a way to the reduced matrix, and the quicker one."""
    known = reduce is None or (isinstance(reduce, str) and reduce in _PAIRWISE)
    return known and any(leaf.quick_heads for leaf in operator.leaves())


def by_channel(operator: Operator, reduce: Reduce) -> Tensor:
    """The matrices of all channels (B, C, L, L), or what they reduce to (B, L, L)."""
    batch, tokens, heads, per_head = operator.shape
    if reduce is None:
        every = torch.empty(
            batch, heads, per_head, tokens, tokens, dtype=operator.dtype, device=operator.device
        )
        for some, p, found in _matrices(operator):
            every[:, some.start : some.stop, p] = found
        return every.flatten(1, 2)
    within, across = _PAIRWISE[reduce]
    out: Tensor | None = None
    for _, _, found in _matrices(operator):
        part = within(found, 1)
        out = part if out is None else across(out, part)
    assert out is not None
    return out


def _matrices(operator: Operator) -> Iterator[tuple[range, int, Tensor]]:
    """Neighbouring heads, a channel of each, and the matrices of these, (B, heads, L, L)."""
    batch, tokens, heads, per_head = operator.shape
    units = torch.eye(per_head, dtype=operator.dtype, device=operator.device)
    one = units.new_ones(1, 1, 1, 1)
    size = max(1, _ELEMENTS // (batch * tokens**2))
    for start in range(0, heads, size):
        some = range(start, min(start + size, heads))
        part = operator.select(some)
        for p, unit in enumerate(units):
            yield some, p, part.contract_heads(unit[None, None, None], one)
