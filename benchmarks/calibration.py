"""What this machine does in the best case: the units in which costs are judged.

Each figure is that of a loop that does nothing else, in float32 on one thread or one GPU, in the
same process as what it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measure import measure

#: Sides of a matrix product that runs at full rate and fits into no first-level cache.
_SIDES = (512, 2048, 512)
#: Elements that fit into a second-level cache, and elements that fit into none.
_CACHED, _STREAMED = 2**15, 2**25
#: How much larger both are on a GPU, which is not busy with less.
_WIDER, _MORE_CACHED = 8, 2**7


@dataclass(frozen=True)
class Calibration:
    """Seconds per unit of work.

    Attributes:
        product: one multiplication and addition inside a matrix product.
        exponential: one power of two of a cached element.
        step: one multiplication and addition of cached elements, element by element.
        byte: one byte read from or written to memory.
        call: one operation on a tensor of a few elements.
    """

    product: float
    exponential: float
    step: float
    byte: float
    call: float


def calibrate(device: str = "cpu") -> Calibration:
    """Measure the five units on this machine, or on one of its devices, now."""
    with torch.device(device):
        return _calibrate(device)


def _calibrate(device: str) -> Calibration:
    wider, more = (_WIDER, _MORE_CACHED) if device.startswith("cuda") else (1, 1)
    rows, inner, columns = (wider * side for side in _SIDES)
    size = more * _CACHED
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    out = torch.empty(rows, columns)
    product = _seconds(lambda: torch.mm(left, right, out=out), 8, device) / (rows * inner * columns)

    cached, other = torch.rand(size), torch.rand(size)
    total = torch.zeros(size)
    exponential = _seconds(lambda: torch.exp2(cached, out=total), 2000, device) / size
    step = _seconds(lambda: total.addcmul_(cached, other), 2000, device) / size

    source, target = torch.zeros(_STREAMED), torch.zeros(_STREAMED)
    byte = _seconds(lambda: target.copy_(source), 8, device) / (2 * 4 * _STREAMED)
    few, sums = torch.rand(8), torch.zeros(8)
    call = _seconds(lambda: sums.add_(few), 20_000, device)
    return Calibration(product, exponential, step, byte, call)


def _seconds(call: Callable[[], Any], times: int, device: str) -> float:
    """Of one call, when it is called over and over."""

    def often() -> None:
        for _ in range(times):
            call()

    return measure(often, device=device).seconds / times
