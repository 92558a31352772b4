"""Parts as large as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


def fitting(whole: range, size: int, form: Callable[[range], T]) -> Iterator[T]:
    """What ``form`` makes of some neighbours at a time, of half as many once memory runs out.

    Args:
        whole: what is cut into parts.
        size: how many make a part, as long as memory allows it.
        form: makes something of a part.
    """
    start = whole.start
    while start < whole.stop:
        part = range(start, min(start + size, whole.stop))
        try:
            yield form(part)
            start = part.stop
        except RuntimeError as error:
            if len(part) == 1 or not ran_out_of_memory(error):
                raise
            # with the error goes its traceback, and what the failed attempt held
            size = len(part) // 2


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the processor's allocator had no more memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
