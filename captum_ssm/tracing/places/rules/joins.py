"""What puts tensors together, or writes one into another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .groups import (
    MOST,
    Call,
    Group,
    Groups,
    TokensMeet,
    aligned,
    differ,
    each,
    joined,
    nowhere,
    on_host,
    same,
    tensors,
    thinned,
    tidied,
)
from .moves import leading


def _beside(pieces: Sequence[Tensor | None], sizes: Sequence[int], dim: int) -> Tensor:
    """Places of tensors beside each other along ``dim``, where they have these sizes."""
    given = [p for p in pieces if p is not None]
    like = given[0]
    alike = len(given) == len(pieces) and all(same(p, like) for p in given)
    if alike and like.size(dim) == 1:  # also beside itself it is one token
        return like
    common = [max(p.size(d) for p in given) for d in range(like.dim())]
    out = []
    for piece, size in zip(pieces, sizes, strict=True):
        common[dim] = size
        out.append((nowhere(like, like.dim()) if piece is None else piece).expand(common))
    return torch.cat(out, dim)


def cat(call: Call) -> Sequence[Groups]:
    dim = call.argument(1, "dim axis", 0) % call.results[0].dim()
    parts = [x for x in call.argument(0, "tensors") if call.shape(x) != (0,)]
    sizes = [call.shape(x)[dim] for x in parts]
    return [joined([call.groups(x) for x in parts], lambda ps: _beside(ps, sizes, dim))]


def stack(call: Call) -> Sequence[Groups]:
    dim = call.argument(1, "dim axis", 0) % call.results[0].dim()
    parts = list(call.argument(0, "tensors"))

    def combine(pieces: Sequence[Tensor | None]) -> Tensor:
        apart = [None if p is None else p.unsqueeze(dim) for p in pieces]
        return _beside(apart, [1] * len(parts), dim)

    return [joined([call.groups(x) for x in parts], combine)]


def where(call: Call) -> Sequence[Groups]:
    condition, x = call.argument(0, "condition"), call.argument(1, "input")
    other = call.argument(2, "other")
    if isinstance(x, Tensor) and x.dtype == torch.bool:  # x.where(condition, other)
        condition, x = x, condition

    condition = on_host(condition)

    def combine(pieces: Sequence[Tensor | None]) -> Tensor:
        like = next(p for p in pieces if p is not None)
        a, b = (nowhere(like, 0) if p is None else p for p in pieces)
        return aligned(torch.where(condition, a, b), call.results[0].dim())

    return [joined([call.groups(x), call.groups(other)], combine)]


def masked_fill(call: Call) -> Sequence[Groups]:
    mask, value = call.argument(1, "mask"), call.argument(2, "value")
    if call.groups(value):
        raise TokensMeet
    dims, mask = call.results[0].dim(), on_host(mask)
    return each(call, lambda p: aligned(torch.where(mask, nowhere(p, 0), p), dims))


def index_fill(call: Call) -> Sequence[Groups]:
    dim, index = call.argument(1, "dim"), on_host(call.argument(2, "index"))
    shape = call.shape(call.first)
    return each(call, lambda p: thinned(p.expand(shape).index_fill(dim, index, -1)))


def assigned(call: Call) -> Sequence[Groups]:
    """x[index] = value, also as index_put."""
    x, index, value = call.first, call.argument(1, "indices"), call.argument(2, "values")
    if call.name == "index_put":
        index = tuple(slice(None) if i is None else i for i in index)
        if call.argument(3, "accumulate", False):
            return _accumulated(call, index, value)
    shape = call.shape(x)
    where, used = leading(on_host(index), len(shape))

    def combine(pieces: Sequence[Tensor | None]) -> Tensor:
        like = next(p for p in pieces if p is not None)
        base, new = (
            nowhere(like, n) if p is None else p
            for p, n in zip(pieces, (len(shape), 0), strict=True)
        )
        behind = new.shape[max(0, new.dim() - len(shape) + used) :]
        rest = torch.broadcast_shapes(base.shape[used:], behind)  # type: ignore[no-untyped-call]
        base = base.expand(shape[:used] + rest).clone()
        base[where] = new
        return base

    return [joined([call.groups(x), call.groups(value)], combine)]


def _accumulated(call: Call, index: Any, value: Any) -> Sequence[Groups]:
    x, index = call.first, on_host(index)
    shape = call.shape(x)
    flat = torch.arange(shape.numel(), device="cpu").view(shape)[index]

    def put(places: Tensor) -> Tensor:
        blank = places.new_full((shape.numel(),), -1)
        return blank.scatter_reduce(0, flat.flatten(), places.flatten(), "amax").view(shape)

    return _added(call, x, value, flat.shape, flat, put, lambda laid: laid[index])


def index_add(call: Call) -> Sequence[Groups]:
    x, dim = call.first, call.argument(1, "dim")
    index, value = on_host(call.argument(2, "index")), call.argument(3, "source tensor")
    shape = call.shape(x)
    size = list(call.shape(value))

    def put(places: Tensor) -> Tensor:
        sizes = list(places.shape)
        sizes[dim] = shape[dim]
        rows = index.view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))])
        blank = places.new_full(sizes, -1)
        return blank.scatter_reduce(dim, rows.expand(places.shape), places, "amax")

    def spread(places: Tensor) -> Tensor:
        sizes = list(places.shape)
        sizes[dim] = size[dim]
        return places.expand(sizes)

    return _added(call, x, value, spread, index, put, lambda laid: laid.index_select(dim, index))


def scatter_add(call: Call) -> Sequence[Groups]:
    x, dim = call.first, call.argument(1, "dim")
    index, value = on_host(call.argument(2, "index")), call.argument(3, "src")
    shape = call.shape(x)

    def put(places: Tensor) -> Tensor:
        return places.new_full(shape, -1).scatter_reduce(dim, index, places, "amax")

    def spread(places: Tensor) -> Tensor:
        return places.expand(call.shape(value))[tuple(map(slice, index.shape))]

    cells = torch.arange(shape.numel(), device="cpu").view(shape).gather(dim, index)
    return _added(call, x, value, spread, cells, put, lambda laid: laid.gather(dim, index))


def _added(
    call: Call,
    x: Any,
    value: Any,
    spread: torch.Size | Callable[[Tensor], Tensor],
    cells: Tensor,
    put: Callable[[Tensor], Tensor],
    take: Callable[[Tensor], Tensor],
) -> Sequence[Groups]:
    """``x`` with ``value`` added where an index says, to some elements perhaps several times.

    Args:
        call: the call.
        x, value: its operands.
        spread: the shape to expand the places of ``value`` to, or what expands them.
        cells: one number for every element of ``x`` that is added to.
        put: lays places of ``value`` out as ``x`` is, the greatest where several meet.
        take: the inverse of ``put``.
    """
    groups = list(call.groups(x))
    is_term = any(any(g.skips.values()) for g in call.groups(value))
    once = is_term and call.kwargs.get("alpha", 1) == 1 and differ(cells)
    for group in call.groups(value):
        rest = spread(group.places) if callable(spread) else group.places.expand(spread)
        skips = group.skips if once else dict.fromkeys(group.skips, 0.0)
        for _ in range(MOST):
            laid = put(rest)
            groups.append(Group(thinned(laid), skips))
            rest = torch.where(take(laid) == rest, -1, rest)
            if bool((rest < 0).all()):
                break
        else:
            raise TokensMeet
    return [tidied(groups)]


def put_together(call: Call) -> Sequence[Groups]:
    """Any other function that puts elements of its operands together: done to places alike."""
    index = call.argument(2, "index") if call.name in ("scatter", "index_copy") else None
    number = call.argument(3, "value") if call.name == "scatter" else None  # or a tensor
    if "reduce" in call.kwargs:
        raise TokensMeet
    operands = [x for x in tensors((*call.args, *call.kwargs.values())) if x is not index]
    operands = [x for x in operands if x.dtype != torch.bool]

    def combine(pieces: Sequence[Tensor | None]) -> Tensor:
        like = next(p for p in pieces if p is not None)
        stand_ins = {
            id(x): (nowhere(like, len(call.shape(x))) if p is None else p).expand(call.shape(x))
            for x, p in zip(operands, pieces, strict=True)
        }
        first = id(call.first)  # perhaps written to
        if first in stand_ins:
            stand_ins[first] = stand_ins[first].clone(memory_format=torch.contiguous_format)

        def stand_in(given: Any) -> Any:
            if isinstance(given, tuple | list):
                return type(given)(map(stand_in, given))
            return stand_ins.get(id(given), -1 if given is number is not None else on_host(given))

        kwargs = {k: stand_in(v) for k, v in call.kwargs.items()}
        return thinned(next(tensors((call.func(*map(stand_in, call.args), **kwargs),))))

    return [joined([call.groups(x) for x in operands], combine)]


def copied(call: Call) -> Sequence[Groups]:
    """x.copy_(source), x.data = source."""
    source, dims = call.argument(1, "src"), call.results[0].dim()
    return [tuple(Group(aligned(p, dims), skips) for p, skips in call.groups(source))]
