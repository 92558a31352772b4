"""A limit on memory, under which what is allocated before it is checked fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def at_most(more: int = 2**30) -> Iterator[None]:
    """Lets the process have so many bytes more than it has, and no others."""
    resource = pytest.importorskip("resource")
    pages = Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("needs Linux, to know how much memory is taken already")
    taken = int(pages.read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
