"""Reduction of many channels' matrices to one matrix (hidden-attention paper, table 5)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import OptionError
from .kernels.portions import at_a_time

if TYPE_CHECKING:
    from .base import Operator


#: ``"mean"``, ``"max"``, ``"min"``, ``"product"``, ``"heads"``, None, or a function that reduces
#: the last dimension of a tensor.
Reduce = str | Callable[[Tensor], Tensor] | None

_NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda a: a.mean(-1),
    "max": lambda a: a.amax(-1),
    "min": lambda a: a.amin(-1),
    "product": lambda a: a.prod(-1),
}


def check_reduce(reduce: Reduce) -> None:
    """Raise OptionError unless :func:`reduce_channels` accepts ``reduce``."""
    if reduce is None or callable(reduce) or reduce in ("heads", *_NAMED):
        return
    names = ", ".join(repr(name) for name in (*_NAMED, "heads"))
    raise OptionError(
        f"reduce={reduce!r} is unknown. Pass one of {names}, None (every channel), or a function "
        "over the last dimension such as discard_smallest(0.4)."
    )


def reduce_channels(values: Tensor, reduce: Reduce) -> Tensor:
    """Reduce (..., L, H, P) to (..., L); None returns (..., C, L), and "heads" (..., H, L)."""
    check_reduce(reduce)
    if reduce is None:
        return values.flatten(-2).transpose(-1, -2)
    if reduce == "heads":
        return values.mean(-1).transpose(-1, -2)
    function = _NAMED[reduce] if isinstance(reduce, str) else reduce
    return function(values.flatten(-2))


def discard_smallest(ratio: float) -> Callable[[Tensor], Tensor]:
    """Return a reduction: the mean over channels without the smallest fraction of the entries.

    Pass it as ``reduce=`` (hidden-attention paper, table 5).

    Args:
        ratio: fraction of the channels to drop at each entry, 0 <= ratio < 1.

    Returns:
        A function that reduces the last dimension of a tensor; it keeps at least one channel.

    Raises:
        OptionError: for a ratio outside this range.

    Example:
        >>> import torch
        >>> from captum_ssm import discard_smallest
        >>> discard_smallest(0.5)(torch.tensor([1.0, 2.0, 3.0, 5.0]))
        tensor(4.)
    """
    number: Any = ratio  # callers may pass anything
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= ratio < 1:
        raise OptionError(f"ratio={ratio!r} is not in 0 <= ratio < 1. Pass a number such as 0.4.")

    def mean_of_largest(values: Tensor) -> Tensor:
        dropped = int(ratio * values.shape[-1] + 1e-9)  # 0.29 * 100 is 28.999...
        keep = max(1, values.shape[-1] - dropped)
        return torch.topk(values, keep, dim=-1, sorted=False).values.mean(-1)

    return mean_of_largest


# --- matrices by head ---------------------------------------------------------------------------

#: Largest number of elements of matrices computed together (8 MiB in float32).  The allocator
#: returns larger memory to the system, and getting it back page by page is slow.
_ELEMENTS = 2**21

#: Reductions that can be accumulated: a function over a dimension, and a function of two tensors.
_PAIRWISE: dict[Reduce, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "max": (torch.amax, torch.maximum),
    "min": (torch.amin, torch.minimum),
    "product": (torch.prod, torch.mul),
}


def goes_by_channel(operator: Operator, reduce: Reduce) -> bool:
    """Return True if :func:`matrices_by_channel` supports the reduction and is faster than rows."""
    is_supported = reduce is None or (isinstance(reduce, str) and reduce in _PAIRWISE)
    is_faster = operator.shape.per_head == 1 and any(leaf.quick_heads for leaf in operator.leaves())
    return is_supported and is_faster


def matrices_by_channel(operator: Operator, reduce: Reduce) -> Tensor:
    """Return the matrices (B, C, L, L) of an operator with P = 1, or their reduction (B, L, L)."""
    if reduce is None:
        return mean_by_head(operator)
    within, across = _PAIRWISE[reduce]
    one = torch.ones(1, 1, 1, 1, dtype=operator.dtype, device=operator.device)
    reduced = (within(sums_by_head(part, one, one), 1) for _, part in _blocks_of_heads(operator))
    return functools.reduce(across, reduced)


def mean_by_head(operator: Operator) -> Tensor:
    """Return the mean matrix of each head's channels (B, H, L, L), a few heads at a time."""
    batch, tokens, heads, per_head = operator.shape
    one = torch.ones(1, 1, 1, 1, dtype=operator.dtype, device=operator.device)
    out = one.new_empty(batch, heads, tokens, tokens)
    for block, part in _blocks_of_heads(operator):
        out[:, block.start : block.stop] = sums_by_head(part, one / per_head, one)
    return out


def sums_by_head(operator: Operator, left: Tensor, right: Tensor) -> Tensor:
    """Sum left[i, c] alpha_c[i, j] right[j, c] over the channels of each head, (B, H, L, L)."""
    tokens = operator.shape.tokens
    return operator.entries(left, {0: right}, range(tokens), by_head=True).full(tokens)


def _blocks_of_heads(operator: Operator) -> Iterator[tuple[range, Operator]]:
    """Yield heads whose matrices together fit into the cache, and the operator on these heads."""
    batch, tokens, heads, _ = operator.shape
    size = max(1, at_a_time(_ELEMENTS, operator.device) // (batch * tokens**2))
    for start in range(0, heads, size):
        block = range(start, min(start + size, heads))
        yield block, operator if len(block) == heads else operator.select(block)
