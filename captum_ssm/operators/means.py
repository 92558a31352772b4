"""Means over channels of products of operators, where heads have channels in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .base import Operator
from .composite import Composite
from .diagonal import Diagonal
from .heads import HeadOperator
from .permute import Permute


def tells_heads_apart(parts: Sequence[Operator]) -> bool:
    """Whether channels of a head differ both before and after what they have in common."""
    apart = [i for i, part in enumerate(parts) if not _alike(part)]
    inside = parts[apart[0] : apart[-1] + 1] if apart else ()
    return any(isinstance(leaf, HeadOperator) for part in inside for leaf in part.leaves())


def mean_at_once(parts: Sequence[Operator], x: Tensor, transposed: bool) -> Tensor:
    """The mean over channels of a product, or of its adjoint, times ``x`` (B, L).

    From all tokens at once, and of each head one channel as long as its channels are alike: they
    are before the first part that tells them apart, and their mean is after the last.

    Args:
        parts: the factors; the last one acts first.
        x: one number per token (B, L).
        transposed: whether it is the adjoint.

    Returns:
        (B, L).
    """
    shape = parts[0].shape
    acting = list(parts if transposed else parts[::-1])
    apart = [i for i, part in enumerate(acting) if not _alike(part)]
    if len(apart) == 1 and isinstance(only := acting[apart[0]], Diagonal):
        acting[apart.pop()] = only.mean_of_channels()
    x = x[..., None, None].expand(*shape[:3], 1)
    for i, part in enumerate(acting):
        x = x.expand(shape) if apart and i == apart[0] else x
        x = part.transpose(x) if transposed else part.apply(x)
        x = x.mean(-1, keepdim=True) if apart and i == apart[-1] else x
    return x.mean((-1, -2))


def reordered(permutes: Sequence[Operator], x: Tensor, transposed: bool) -> Tensor:
    """Vectors (B, L) reordered by one permutation after the other, or by their adjoints.

    Args:
        permutes: those that act first come first.
        x: the vectors.
        transposed: whether it is the adjoints.
    """
    x = x[..., None, None]
    for permute in permutes:
        x = permute.transpose(x) if transposed else permute.apply(x)
    return x[..., 0, 0]


def _alike(part: Operator) -> bool:
    """Whether an operator acts alike on all value channels of a head, however many there are."""
    if isinstance(part, Composite):
        return all(map(_alike, part.parts))
    if isinstance(part, Diagonal):
        return part.weight.shape[-1] == 1
    return isinstance(part, HeadOperator | Permute)
