"""What a device is asked to do: launches, bytes, arithmetic, and waits of the host for it.

The counts depend on no machine.  An operation of torch that computes anything is a launch, whether
its kernel is one or a few; views are none.  Bytes are those of what it reads and writes, numbers
that are repeated counted once.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_OURS = [str(Path(__file__).with_name(name)) for name in ("counts.py", "stand_in.py")]
#: What the host waits for, besides copies to it.
_WAITED_FOR = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.unique_consecutive,
    aten._unique2,
    aten.unique_dim,
    aten._linalg_check_errors,
    aten.bincount,
}
#: Of these an index of truth values has to be counted first.
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
#: What only makes memory, or is a copy to the host.
_NO_LAUNCH = {
    aten._local_scalar_dense,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.lift_fresh,
    aten._reshape_alias,
    aten._unsafe_view,
    aten.set_,
    aten.resize_,
}
#: What moves numbers and computes none.
_MOVING = {aten._to_copy, aten.clone, aten.copy_}
#: What reads only what it returns of its first tensor.
_GATHERING = {aten.embedding, aten.index, aten.index_select, aten.gather}


@dataclass
class Counts:
    """What has run.

    Attributes:
        launches: operations that compute.
        bytes: read and written.
        flops: products and sums of floating-point numbers, and one for each number that any other
            operation writes, those inside kernels among them.
        uploads: copies from the host.
        wide: launches that write float64.
        waits: where the host waited for the device, by file and line.
        by_name: launches of each operation.
    """

    launches: int = 0
    bytes: float = 0
    flops: float = 0
    uploads: int = 0
    wide: int = 0
    waits: list[str] = field(default_factory=list)
    by_name: Counter[str] = field(default_factory=Counter)

    @property
    def synchronisations(self) -> int:
        """How often the host waited."""
        return len(self.waits)

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Count one operation.

        Args:
            func, args, kwargs: an overload of ``torch.ops`` and its arguments.
            out: what it returned.
        """
        packet = func._overloadpacket
        if packet in _WAITED_FOR or (packet in _INDEXED and _has_to_count(packet, args)):
            self.synchronised(func, place())
        if packet in _NO_LAUNCH or _is_view(func):
            return
        read = tuple(tensors_in((args, kwargs)))
        if packet in _GATHERING:
            read = (*tensors_in(out), *read[1:])
        self.by_name[str(packet)] += 1
        self.flops += arithmetic(func, args, kwargs, out)
        self.launched(read, tensors_in(out))

    def launched(self, read: Iterable[Any], written: Iterable[Any]) -> None:
        """Count a launch, without its arithmetic.

        Args:
            read, written: the tensors.
        """
        results = [x for x in written if isinstance(x, Tensor)]
        self.launches += 1
        self.bytes += sum(size_of(x) for x in (*read, *results) if isinstance(x, Tensor))
        self.wide += any(x.dtype == torch.float64 for x in results)

    def synchronised(self, func: Any, place: str) -> None:
        """Count a wait of the host."""
        self.waits.append(f"{place} {func._overloadpacket.__name__}")


def arithmetic(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    """Products and sums of an operation, else one for each number that it writes.

    Args:
        func, args, kwargs: an overload of ``torch.ops`` and its arguments.
        out: what it returned.
    """
    packet = func._overloadpacket
    if packet in _NO_LAUNCH or packet in _MOVING or _is_view(func):
        return 0
    formula = flop_registry.get(packet)
    if formula is not None:
        found: float = formula(*args, **kwargs, out_val=out)
        return found
    return sum(x.numel() for x in tensors_in(out))


def _is_view(func: Any) -> bool:
    """Whether what is returned is its argument's own memory, left as it was."""
    returns = func._schema.returns
    return bool(returns) and all(
        x.alias_info is not None and not x.alias_info.is_write for x in returns
    )


def _has_to_count(packet: Any, args: tuple[Any, ...]) -> bool:
    """Whether an index holds truth values, and is not that of one number to be filled in."""
    of_truth = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
    fills = packet is not aten.index and args[2].numel() == 1
    return of_truth and not fills


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's numbers, those that are repeated counted once."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return x.element_size() * math.prod(size for size, stride in sizes if stride)


def place() -> str:
    """Where the code stands that runs now, that of torch and of what counts aside."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(path: str) -> bool:
    return path in _OURS or path.startswith(_TORCH)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
