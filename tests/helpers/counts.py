"""What a device is asked to do: launches, bytes, arithmetic, and waits of the host for it.

The counts depend on no machine.  An operation of torch that computes anything is a launch, whether
its kernel is one or a few; views are none.  Bytes are those of what it reads and writes, numbers
that are repeated counted once.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_OURS = [str(Path(__file__).with_name(name)) for name in ("counts.py", "mps.py", "stand_in.py")]
#: What the host waits for, besides copies to it.
_WAITED_FOR = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.unique_consecutive,
    aten._unique2, aten.unique_dim, aten._linalg_check_errors, aten.bincount,
}  # fmt: skip
#: Of these an index of truth values has to be counted first.
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
#: What only makes memory, or is a copy to the host.
_NO_LAUNCH = {
    aten._local_scalar_dense, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten.lift_fresh, aten._reshape_alias, aten._unsafe_view, aten.set_,
    aten.resize_,
}  # fmt: skip
#: What moves numbers and computes none.
_MOVING = {aten._to_copy, aten.clone, aten.copy_}
#: What reads only what it returns of its first tensor.
_GATHERING = {aten.embedding, aten.index, aten.index_select, aten.gather}


#: What arguments and results are nested in.
_NESTED = (list, tuple, dict)


@dataclass
class Counts:
    """What has run.

    Attributes:
        launches: operations that compute.
        bytes: read and written.
        flops: products and sums of floating-point numbers, and one for each number that any other
            operation writes, those inside kernels among them.
        uploads: copies from the host, which it waits for as well: its memory is pageable.
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

    @property
    def questions(self) -> int:
        """How often it waited for an answer of the device."""
        return len(self.waits) - self.uploads

    def add(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any,
        given: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Count one operation."""
        kind = kind_of(func)
        if kind.is_waited_for or (kind.may_count and _has_to_count(func._overloadpacket, args)):
            self.synchronised(func, place())
        if not kind.launches:
            return
        written = tensors_in(out)
        read = [*written, *given[1:]] if kind.gathers else given
        self.by_name[kind.name] += 1
        self.flops += arithmetic(func, args, kwargs, out)
        self.launched(read, written)

    def launched(self, read: Iterable[Any], written: Iterable[Any]) -> None:
        """Count a launch, without its arithmetic."""
        results = [x for x in written if isinstance(x, Tensor)]
        self.launches += 1
        self.bytes += sum(size_of(x) for x in (*read, *results) if isinstance(x, Tensor))
        self.wide += any(x.dtype == torch.float64 for x in results)

    def uploaded(self, place: str) -> None:
        """Count a copy from the host, which waits until it is done."""
        self.uploads += 1
        self.waits.append(f"{place} upload")

    def synchronised(self, func: Any, place: str) -> None:
        """Count a wait of the host."""
        self.waits.append(f"{place} {func._overloadpacket.__name__}")


def arithmetic(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    """Products and sums of an operation, else one for each number that it writes."""
    kind = kind_of(func)
    if not kind.launches or kind.moves:
        return 0
    if kind.formula is not None:
        return kind.formula(*args, **kwargs, out_val=out)
    return sum(x.numel() for x in tensors_in(out))


class Kind(NamedTuple):
    """What is known of an operation."""

    name: str
    is_view: bool  # always its argument's own memory, left as it was
    launches: bool
    is_waited_for: bool
    may_count: bool  # truth values among its indices
    gathers: bool  # it reads only what it returns of its first tensor
    moves: bool  # it computes no numbers
    formula: Callable[..., float] | None  # its products and sums


@functools.cache
def kind_of(func: Any) -> Kind:
    """What is known of an operation, whatever it is given."""
    packet, returns = func._overloadpacket, func._schema.returns
    may_be_view = bool(returns) and all(
        x.alias_info is not None and not x.alias_info.is_write for x in returns
    )
    return Kind(
        str(packet),
        may_be_view and not _is_composed(func),
        not may_be_view and packet not in _NO_LAUNCH,
        packet in _WAITED_FOR,
        packet in _INDEXED,
        packet in _GATHERING,
        packet in _MOVING,
        flop_registry.get(packet),
    )


def _is_composed(func: Any) -> bool:
    """Whether other operations make it up, of which one may be a copy, as of ``reshape``."""
    implicit = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit))


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
    """Where the code stands that runs now, that of torch, of modes and of what counts aside."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_aside(frame.f_code):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_aside(code: CodeType) -> bool:
    path = code.co_filename
    return code.co_name == "__torch_function__" or path in _OURS or path.startswith(_TORCH)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments or results, however nested."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, _NESTED):
        return []
    found: list[Tensor] = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _NESTED):
            found += tensors_in(item)
    return found
