"""Time and peak memory of one call, in this process.

Times are medians of processor seconds on one thread; what is reported are ratios of figures taken
in the same run, because absolute times say little on a shared machine.
"""

from __future__ import annotations

import ctypes
import gc
import os
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
#: Seconds that repeated calls take together at least, and most repetitions.
_ENOUGH, _MOST = 0.25, 25


@dataclass(frozen=True)
class Cost:
    """What a call took.

    Attributes:
        seconds: median processor time.
        own_seconds: the median of what of it the program took itself, and not the system, which
            maps its memory.
        mebibytes: peak resident memory above what was there before; None off Linux.
        result: what the call returned.
    """

    seconds: float
    own_seconds: float
    mebibytes: float | None
    result: Any


def measure(call: Callable[[], Any], repeats: int = 3) -> Cost:
    """Run ``call`` once for its memory and result, then for its time.

    A call that takes more than ten seconds is not repeated, and a short one is repeated until it
    has taken a quarter of a second in all, or 25 times: of few milliseconds, three tell little.
    """
    gc.collect()
    before = _start_of_peak()
    found: list[Any] = []
    times = [_times(lambda: found.append(call()))]
    peak = _resident("VmHWM")
    if times[0][0] < 10:
        times = [_times(call) for _ in range(repeats)]
        while len(times) < _MOST and sum(seconds for seconds, _ in times) < _ENOUGH:
            times.append(_times(call))
    seconds, own_seconds = map(statistics.median, zip(*times, strict=True))
    memory = None if before is None or peak is None else (peak - before) / 1024
    return Cost(seconds, own_seconds, memory, found[0])


def processor_seconds(call: Callable[[], Any]) -> float:
    """What one call takes of this process, whoever else has the processor meanwhile."""
    start = time.process_time()
    call()
    return time.process_time() - start


def _times(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call, and those of the processor that are not the system's."""
    own = os.times().user
    return processor_seconds(call), os.times().user - own


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, the machine and the named packages."""
    found = {"python": sys.version.split()[0], "machine": platform.machine()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _start_of_peak() -> float | None:
    """Kibibytes that are in use; what is used at most from now on is remembered."""
    _release_free_memory()
    before = _resident("VmRSS")
    _reset_peak()
    return before


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
