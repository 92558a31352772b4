"""How much memory there is, and how much of it tensors take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

_MEMINFO = Path("/proc/meminfo")
#: What counts as free where the system does not tell (4 GiB).
_UNKNOWN = 2**32


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; a fixed guess where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and _MEMINFO.exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        if match is not None:
            return 1024 * int(match[1])
    return _UNKNOWN


def bytes_of(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Bytes that tensors keep from being freed, memory that several share counted once."""
    # a quantised weight's own memory may lie in parts that it alone knows
    kept = {t.untyped_storage().data_ptr() for t in besides if type(t) in (Tensor, nn.Parameter)}
    storages = (tensor.untyped_storage() for tensor in tensors)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for place, size in sizes.items() if place not in kept)
