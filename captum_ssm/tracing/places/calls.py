"""What torch's functions are called, what they write to, and where tensors lie in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .origin import Origin
from .rules import HANDING, plain
from .rules.groups import tensors

#: A term of a sum, and what it is multiplied with.
Term = tuple[Tensor, float]


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function; that of an operator of others than torch tells whose it is."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = func if isinstance(func, torch._ops.OpOverloadPacket) else func.overloadpacket
        return str(packet._qualified_op_name).removeprefix("aten::")
    return func.__name__


def written_by(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """The tensors that a function which returns none has written to."""
    if name in ("__setitem__", "__set__"):
        yield args[0]
    elif name.startswith("_foreach_"):
        yield from tensors(args[:1])
    elif isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = func if isinstance(func, torch._ops.OpOverloadPacket) else func.overloadpacket
        for overload in packet.overloads():
            declared = getattr(packet, overload)._schema.arguments
            for i, argument in enumerate(declared):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[i] if i < len(args) else kwargs.get(argument.name)
                    yield from tensors((given,))


@functools.cache
def not_in_place(name: str) -> str:
    """The plain name of a function, or of the one that does the same, not in place."""
    name = plain(name)
    return plain(name[:-1]) if name[-1] == "_" != name[-2] else name


def terms_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Term, Term] | None:
    """The terms of a sum or difference; None if they are not two tensors."""
    terms = list(tensors((*args, *kwargs.values())))
    if len(terms) != 2:
        return None
    alpha = kwargs.get("alpha", 1.0)
    return (terms[0], 1.0), (terms[1], alpha if name == "add" else -alpha)


def is_ids(x: Tensor) -> bool:
    return x.dtype in (torch.int64, torch.int32)


def is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def is_followed(result: Tensor, name: str, operands: Iterable[tuple[Tensor, Origin]]) -> bool:
    """Whether a result is: numbers are, and ids that are handed on as they are."""
    if is_number(result):
        return True
    ids = any(not is_number(x) for x, _ in operands)
    return ids and name in HANDING and result.dtype != torch.bool


def storage_of(tensor: Tensor) -> int:
    """A number that tensors have in common which share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor lies in memory: shape, strides, where it begins, bytes of an element."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.element_size()
