"""Splitting work into parts: how many tokens, heads or elements to compute together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor


def even_size(tokens: int, most: int) -> int:
    """Return the size of equal parts, as few as possible and each at most ``most``."""
    return -(-tokens // -(-tokens // most))


def parts(tokens: int, size: int, backwards: bool) -> Iterator[slice]:
    """Yield slices of at most ``size`` tokens, from first to last, or from last to first."""
    starts = range(0, tokens, size)
    for start in reversed(starts) if backwards else starts:
        yield slice(start, min(start + size, tokens))


# --- heads -------------------------------------------------------------------------------------


def some_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Select heads of ``x`` (B, L, H, ...); return a view if they are neighbors."""
    if isinstance(heads, range) and heads.step == 1:
        return x[:, :, heads.start : heads.stop]
    return x[:, :, list(heads)]


def vectors_of_heads(x: Tensor, heads: int, part: slice | Tensor = slice(None)) -> Tensor:
    """Return the vectors of some heads (B, L, h, N), or (B, L, 1, N) if all heads share them.

    Args:
        x: vectors (B, L, N) for all heads, or (B, L, G, N) for each group of heads.
        heads: number of heads, H.
        part: the heads to return. Default: all.
    """
    if x.dim() == 3:
        return x[:, :, None]
    per_group = heads // x.shape[2]
    return x[:, :, torch.arange(heads, device=x.device)[part] // per_group]


# --- memory ------------------------------------------------------------------------------------

#: Largest number of elements computed together on a GPU (64 MiB in float32).
LAUNCHED = 2**24


def at_a_time(cached: int, device: torch.device, launched: int = LAUNCHED) -> int:
    """Return how many elements to compute together; more on a GPU, where each part is a launch.

    Args:
        cached: number of elements on a CPU, such that they fit into its cache.
        device: the device of the elements.
        launched: number of elements on other devices. Default: 2**24.
    """
    return cached if device.type == "cpu" else launched


T = TypeVar("T")


def as_memory_allows(numbers: range, size: int, form: Callable[[range], T]) -> Iterator[T]:
    """Yield ``form(part)`` for each part of a range; halve the parts if memory runs out.

    Args:
        numbers: the range to split.
        size: length of a part before any halving.
        form: function to call with each part.
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
    """Return True if the error reports that a GPU or the CPU ran out of memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
