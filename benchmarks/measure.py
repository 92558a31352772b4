"""Time and peak memory of one call, in this process.

Times are medians of processor seconds on one thread; what is reported are ratios of figures taken
in the same run, because absolute times say little on a shared machine.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Cost:
    """What a call took.

    Attributes:
        seconds: median processor time.
        mebibytes: peak resident memory above what was there before; None off Linux.
        result: what the call returned.
    """

    seconds: float
    mebibytes: float | None
    result: Any


def measure(call: Callable[[], Any], repeats: int = 3) -> Cost:
    """Run ``call`` once for its memory and result, then for its time.

    A call that takes more than ten seconds is not repeated.
    """
    gc.collect()
    _release_free_memory()
    before = _resident("VmRSS")
    _reset_peak()
    start = time.process_time()
    result = call()
    times = [time.process_time() - start]
    peak = _resident("VmHWM")
    if times[0] < 10:
        times = []
        for _ in range(repeats):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
    memory = None if before is None or peak is None else (peak - before) / 1024
    return Cost(statistics.median(times), memory, result)


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, the machine and the named packages."""
    found = {"python": sys.version.split()[0], "machine": platform.machine()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _resident(field: str) -> int | None:
    """Kibibytes of VmRSS (now) or VmHWM (peak)."""
    if not _STATUS.exists():
        return None
    match = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    return int(match.group(1)) if match else None


def _reset_peak() -> None:
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _release_free_memory() -> None:
    """Give freed memory back, so that a call's own allocations show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
