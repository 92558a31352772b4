"""Arithmetic that takes numbers too small to be normal for zero, for the time of a ``with``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def underflow_flushed() -> Iterator[None]:
    """Let the calling thread's processor flush denormal numbers to zero.

    What decays token by token soon underflows, and processors take some hundred cycles for each
    operation on a denormal number: whole scans would be several times slower for the sake of
    numbers below 1e-38.
    """
    if _is_flushed():
        yield
        return
    try:
        torch.set_flush_denormal(True)
        yield
    finally:
        torch.set_flush_denormal(False)


def _is_flushed() -> bool:
    """Whether the thread flushes already; torch can set the mode but not tell it."""
    tiny = torch.full((), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
    return not tiny.mul_(0.5).item()
