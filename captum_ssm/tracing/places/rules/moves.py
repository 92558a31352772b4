"""Views and reorderings: the same is done to the places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .groups import (
    Call,
    Group,
    Groups,
    TokensMeet,
    aligned,
    alike,
    each,
    meet,
    on_host,
    reshaped,
    tensors,
    thin,
    thinned,
    tidied,
)


def kept(call: Call) -> Sequence[Groups]:
    """Casts, copies, moves to other devices."""
    return alike(call, call.groups(call.first))


def taken(call: Call) -> Sequence[Groups]:
    """Any function that only hands on what is in its first operand: done to the places alike."""
    shape = call.shape(call.first)
    found: list[list[Group]] = [[] for _ in call.results]
    for places, skips in call.groups(call.first):
        parts = call.again(call.first, places.expand(shape))
        for groups, part in zip(found, parts, strict=True):
            view = part.untyped_storage()._cdata == places.untyped_storage()._cdata
            groups.append(Group(thin(part) if view else thinned(part), skips))
    return [tidied(groups) if len(groups) > 1 else tuple(groups) for groups in found]


def reordered(call: Call) -> Sequence[Groups]:
    """Dimensions in another order, or read backwards."""
    return each(call, lambda places: call.again(call.first, places)[0])


def rolled(call: Call) -> Sequence[Groups]:
    return reordered(call) if call.argument(2, "dims") not in (None, ()) else taken(call)


def reshaping(call: Call) -> Sequence[Groups]:
    if isinstance(call.argument(1, "dtype"), torch.dtype):
        raise TokensMeet  # bytes read as other numbers
    old, new = call.shape(call.first), call.results[0].shape
    return each(call, lambda places: reshaped(places, old, new))


def broadcast(call: Call) -> Sequence[Groups]:
    if call.name == "broadcast_tensors":
        operands = list(tensors(call.args))
        dims = call.results[0].dim()
        return [
            tuple(Group(aligned(p, dims), skips) for p, skips in call.groups(x)) for x in operands
        ]
    return each(call, lambda places: aligned(places, call.results[0].dim()))


def repeated(call: Call) -> Sequence[Groups]:
    new = call.results[0].shape
    old = (1,) * (len(new) - len(call.shape(call.first))) + tuple(call.shape(call.first))

    def move(places: Tensor) -> Tensor:
        places = aligned(places, len(new))
        times = [n // o if p > 1 else 1 for n, o, p in zip(new, old, places.shape, strict=True)]
        return places.repeat(times)

    return each(call, move)


def interleaved(call: Call) -> Sequence[Groups]:
    dim = call.argument(2, "dim")
    if dim is None:
        return taken(call)
    return each(call, lambda p: p if p.size(dim) == 1 else call.again(call.first, p)[0])


def selected(call: Call) -> Sequence[Groups]:
    """index_select."""
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if call.groups(index):
        return looked_up(call, index) if dim % call.results[0].dim() == 0 else meet()
    return each(call, lambda p: p if p.size(dim) == 1 else p.index_select(dim, on_host(index)))


def gathered(call: Call) -> Sequence[Groups]:
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if call.name == "take_along_dim":
        index, dim = call.argument(1, "indices"), call.argument(2, "dim")
        if dim is None:
            return taken(call)
        index = index.expand(call.results[0].shape)
    if call.groups(index):
        raise TokensMeet
    shape, index = call.shape(call.first), on_host(index)

    def move(places: Tensor) -> Tensor:
        sizes = list(index.shape)
        sizes[dim] = shape[dim]
        given, picks = places.expand([max(n, m) for n, m in zip(sizes, shape, strict=True)]), index
        for d in range(len(shape)):
            if d == dim % len(shape):
                picks = picks.narrow(d, 0, 1) if places.size(d) == 1 else picks
            elif places.size(d) == 1 and (picks.stride(d) == 0 or picks.size(d) == 1):
                given, picks = given.narrow(d, 0, 1), picks.narrow(d, 0, 1)
        return thinned(given.gather(dim, picks))

    return each(call, move)


def item(call: Call) -> Sequence[Groups]:
    """x[index]."""
    x, index = call.args
    ids = [i for i in tensors((index,)) if call.groups(i)]
    if ids:
        alone = index is ids[0] or (isinstance(index, tuple) and len(index) == 1)
        return looked_up(call, ids[0]) if alone and not call.groups(x) else meet()
    if not call.groups(x):
        return [()]
    shape = call.shape(x)
    if not any(True for _ in tensors((index,))) and not _holds_list(index):
        return taken(call)
    where, used = leading(on_host(index), len(shape))
    return each(call, lambda p: p.expand(shape[:used] + p.shape[used:])[where])


def _holds_list(index: Any) -> bool:
    plain = isinstance(index, int | slice | type(None) | type(...))
    return not plain and not (isinstance(index, tuple) and not any(_holds_list(i) for i in index))


def leading(index: Any, dims: int) -> tuple[tuple[Any, ...], int]:
    """The index of the leading dimensions, and how many these are; the others are left whole."""
    if isinstance(index, list) and not any(isinstance(i, Tensor | slice | list) for i in index):
        index = (torch.as_tensor(index),)
    parts = [
        p if isinstance(p, Tensor | slice | int | type(None) | type(...)) else torch.as_tensor(p)
        for p in (index if isinstance(index, tuple | list) else (index,))
    ]

    def used(part: Any) -> int:
        if part is None or part is ... or isinstance(part, bool):
            return 0
        is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
        return part.dim() if is_mask else 1

    for i, part in enumerate(parts):
        if part is ...:
            rest = dims - sum(map(used, parts))
            parts[i : i + 1] = [slice(None)] * rest
            break
    while parts and isinstance(parts[-1], slice) and parts[-1] == slice(None):
        parts.pop()
    return tuple(parts), sum(map(used, parts))


def lookup(call: Call) -> Sequence[Groups]:
    """embedding: a token's row is the token."""
    ids = [x for x in tensors((*call.args, *call.kwargs.values())) if call.groups(x)]
    return meet() if len(ids) > 1 or ids[0].is_floating_point() else looked_up(call, ids[0])


def looked_up(call: Call, ids: Tensor) -> Sequence[Groups]:
    added = (1,) * (call.results[0].dim() - ids.dim())
    return [tuple(Group(p.reshape(p.shape + added), s) for p, s in call.groups(ids))]


def padded(call: Call) -> Sequence[Groups]:
    x, pads = call.first, call.argument(1, "pad")
    mode = call.argument(2, "mode", "constant") if call.name == "pad" else "constant"
    shape = call.shape(x)
    grown = {len(shape) - 1 - i // 2 for i, amount in enumerate(pads) if amount > 0}

    def move(places: Tensor) -> Tensor:
        if mode != "constant":
            given = places.expand(shape).double()
            return thinned(F.pad(given, pads, mode).to(places.dtype))
        both = enumerate(zip(shape, places.shape, strict=True))
        sizes = [n if d in grown else p for d, (n, p) in both]
        dims = [len(shape) - 1 - i // 2 for i in range(len(pads))]
        cut = [n if d in grown or sizes[d] > 1 else 0 for d, n in zip(dims, pads, strict=True)]
        return F.pad(places.expand(sizes), cut, value=-1)

    return each(call, move)


def triangle(call: Call) -> Sequence[Groups]:
    """tril and triu."""
    shape = call.shape(call.first)
    return each(call, lambda p: thinned(call.again(call.first, p.expand(shape) + 1)[0] - 1))


def strided(call: Call) -> Sequence[Groups]:
    """as_strided, of places that lie in memory as the tensor does."""
    x, shape = call.first, call.shape(call.first)
    if not x.is_contiguous() or x.storage_offset():
        raise TokensMeet
    return each(call, lambda p: thinned(call.again(x, p.expand(shape).contiguous())[0]))


def constant(call: Call) -> Sequence[Groups]:
    """What does not depend on its operands' numbers."""
    return [()] * len(call.results)
