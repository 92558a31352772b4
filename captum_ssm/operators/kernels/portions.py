"""How work is cut into parts: so many tokens at a time, some of the heads, as memory allows.

Causal operators are fed a few tokens at a time, in the order in which their state runs, and their
adjoints in reverse, with no more in hand than that state: a :class:`Stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

# --- tokens ------------------------------------------------------------------------------------


class Portion(NamedTuple):
    """How many tokens to feed to an operator's stream at a time.

    Attributes:
        elements: elements of all channels of these tokens together.
        most: the most tokens.
        multiple: the number of tokens should be a multiple of this.
    """

    elements: int
    most: int
    multiple: int = 1


#: For selective scans, whose states then stay in a processor's second cache.
SMALL = Portion(2**15, 32)
#: For operators with one number for each channel and token.
LARGE = Portion(2**19, 1024)


class Stream(Protocol):
    """An operator, or its adjoint, on the next tokens; it keeps its state for later calls."""

    def __call__(self, x: Tensor, part: slice) -> Tensor:
        """Map values (B, T, H, P) of the tokens ``part`` to the outputs of the same tokens."""


def evenly(tokens: int, most: int, multiple: int = 1) -> int:
    """Return the size of parts of about equal size, as few as parts of ``most`` tokens would be."""
    each = -(-tokens // -(-tokens // most))
    return -(-each // multiple) * multiple


def parts(tokens: int, size: int, backwards: bool) -> Iterator[slice]:
    """Yield at most ``size`` tokens at a time, from the first, or backwards from the last."""
    starts = range(0, tokens, size)
    for start in reversed(starts) if backwards else starts:
        yield slice(start, min(start + size, tokens))


# --- heads -------------------------------------------------------------------------------------

#: Neighboring heads, or the indices (h,) of any.
Heads: TypeAlias = slice | Tensor


def some_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Select heads of (B, L, H, ...); neighbors as a view."""
    if isinstance(heads, range) and heads.step == 1:
        return x[:, :, heads.start : heads.stop]
    return x[:, :, list(heads)]


def gather_heads(x: Tensor, heads: Heads, out: Tensor | None = None) -> Tensor:
    """Select heads of (B, T, H), by the fastest way."""
    if isinstance(heads, slice):
        return x[:, :, heads] if out is None else out.copy_(x[:, :, heads])
    # several times as fast as an index along the last dimension
    return torch.gather(x, 2, heads.expand(*x.shape[:2], -1), out=out)


def vectors_of_heads(x: Tensor, heads: int, part: Heads = slice(None)) -> Tensor:
    """Vectors of some heads, (B, L, h, N), or (B, L, 1, N) if all heads share them.

    Args:
        x: (B, L, N) common to all heads, or (B, L, G, N) by group.
        heads: H.
        part: the heads. Default: all.
    """
    if x.dim() == 3:
        return x[:, :, None]
    each = heads // x.shape[2]
    return x[:, :, torch.arange(heads, device=x.device)[part] // each]


# --- memory ------------------------------------------------------------------------------------

#: Elements that are taken at a time where launches cost more than memory (64 MiB in float32).
LAUNCHED = 2**24


def at_a_time(cached: int, device: torch.device, launched: int = LAUNCHED) -> int:
    """Return how many elements to hold at a time: more where each part costs launches.

    Args:
        cached: how many stay in a processor's cache.
        device: the device that holds them.
        launched: how many to hold on other devices. Default: 2**24.
    """
    return cached if device.type == "cpu" else launched


T = TypeVar("T")


def as_memory_allows(numbers: range, size: int, form: Callable[[range], T]) -> Iterator[T]:
    """Yield ``form`` of each part of a range; halve the parts once memory runs out.

    Args:
        numbers: the range.
        size: the length of a part, as long as memory allows it.
        form: called with each part.
    """
    start = numbers.start
    while start < numbers.stop:
        part = range(start, min(start + size, numbers.stop))
        try:
            yield form(part)
            start = part.stop
        except RuntimeError as error:
            if len(part) == 1 or not ran_out_of_memory(error):
                raise
            # leaving the except block frees the traceback, and the memory of the failed attempt
            size = len(part) // 2


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return True if a device or the processor's allocator had no more memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
