"""What each of torch's functions does to the places that the elements of a tensor come from.

*Places* are an integer tensor with as many dimensions as the tensor that it speaks of, and size 1
in every dimension along which that does not tell tokens apart: B * L numbers for one (B, L, E).
Each is the flat index, b * L + t, of the token of a source that the element was computed from, or
-1 for an element that comes from none.  A *group* is places and the sources that share them, each
with its *skip*: the weight with which the source itself, unchanged, is a term of the tensor.

Functions fall into a few kinds:

=========  ======================================================================================
moves      views and reorderings: the same is done to the places
joins      cat, where, writes: the same is done to the places of all, with -1 for constants
sums       of two; skips add up
pointwise  element by element: the places of all operands, without their skips
along      norms, softmax, reductions: the places must not differ along the dimensions
products   likewise, along the dimensions that are contracted
=========  ======================================================================================

A rule that finds elements of several tokens brought together raises :class:`TokensMeet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: How many different tokens of one source an element may come from; beyond that they are mixed.
MOST = 4


class Group(NamedTuple):
    """Sources that share their places, each with its skip."""

    places: Tensor
    skips: dict[int, float]

    def through(self, places: Tensor) -> Group:
        """Other places of the same sources, none of which is a term any more."""
        return Group(places, dict.fromkeys(self.skips, 0.0))


Groups = tuple[Group, ...]


class TokensMeet(Exception):
    """Elements of several tokens were brought together.

    Args:
        pooled: whether all tokens of a tensor were, by a sum, a mean or a maximum. Default: False.
    """

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.pooled = pooled


class Call:
    """One call of one of torch's functions.

    Args:
        name, func, args, kwargs: as below.
        results: as below.
        known: shape before the call and groups of each tracked operand, by its id.
        lengths: how many tokens each source has.

    Attributes:
        name: the function's plain name; of one that works in place that of the one that does not.
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        results: the tensors that it returned or wrote to.
        lengths: how many tokens each source has.
    """

    def __init__(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[Tensor],
        known: dict[int, tuple[torch.Size, Groups]],
        lengths: Callable[[int], int],
    ) -> None:
        self.name = name
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.results = results
        self.lengths = lengths
        self._known = known

    @property
    def first(self) -> Any:
        """The first argument, also where it came by its name."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def argument(self, position: int, names: str, default: Any = None) -> Any:
        """An argument by its position or one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[n] for n in names.split() if n in self.kwargs), default)

    def groups(self, x: Any) -> Groups:
        """The groups of an operand; none if it is not tracked."""
        known = self._known.get(id(x))
        return () if known is None else known[1]

    def shape(self, x: Any) -> torch.Size:
        """The shape that an operand had before the call."""
        known = self._known.get(id(x))
        return (x.shape if isinstance(x, Tensor) else torch.Size()) if known is None else known[0]

    def again(self, x: Any, stand_in: Any) -> list[Tensor]:
        """What the function returns with something in place of the operand ``x``."""
        args = tuple(stand_in if a is x else a for a in self.args)
        kwargs = {k: stand_in if a is x else a for k, a in self.kwargs.items()}
        return list(tensors((self.func(*args, **kwargs),)))


#: A rule returns the groups of every result; of one whose results are alike those of the first.
Rule = Callable[[Call], Sequence[Groups]]


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among ``values``, however nested."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors(value)


# --- places ---------------------------------------------------------------------------------------


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two places are equal; most often they are one tensor, or views of one."""
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


def thin(places: Tensor) -> Tensor:
    """Places with size 1 in the dimensions along which they are expanded."""
    for dim, (size, stride) in enumerate(zip(places.shape, places.stride(), strict=True)):
        if size > 1 and stride == 0:
            places = places.narrow(dim, 0, 1)
    return places


def thinned(places: Tensor) -> Tensor:
    """Places with size 1 in the dimensions along which they do not differ."""
    for dim, size in enumerate(places.shape):
        if size > 1:
            one = places.narrow(dim, 0, 1)
            places = one if bool((places == one).all()) else places
    return places


def aligned(places: Tensor, dims: int) -> Tensor:
    """Places of a tensor that is broadcast to so many dimensions."""
    return places[(None,) * (dims - places.dim())] if places.dim() < dims else places


def settled(places: Tensor, dims: Iterable[int]) -> Tensor:
    """Places with size 1 along ``dims``, where all that come from a token come from one."""
    apart = [dim for dim in dims if places.size(dim) > 1]
    if not apart:
        return places
    one = places.amax(apart, keepdim=True)
    if not bool(((places == one) | (places < 0)).all()):
        raise TokensMeet
    return one


def reshaped(places: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """Places after a tensor of shape ``old`` took the shape ``new``.

    Only those dimensions are expanded that are merged with, or cut from, one that tells tokens
    apart.
    """
    sizes: list[int] = []
    target: list[int] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        rows, columns = 1, 1
        if i < len(old):
            rows, i = old[i], i + 1
        if j < len(new):
            columns, j = new[j], j + 1
        while rows != columns:
            if rows < columns:
                rows, i = rows * old[i], i + 1
            else:
                columns, j = columns * new[j], j + 1
        constant = all(places.size(dim) == 1 for dim in range(first_i, i))
        sizes += [1] * (i - first_i) if constant else old[first_i:i]
        target += [1] * (j - first_j) if constant else new[first_j:j]
    return places.expand(sizes).reshape(target)


def is_whole(group: Group, dims: Iterable[int], call: Call) -> bool:
    """Whether ``dims`` are all along which the tokens of an example lie."""
    apart = [dim for dim in dims if group.places.size(dim) > 1]
    length = call.lengths(next(iter(group.skips)))
    example = torch.div(group.places, length, rounding_mode="floor")  # -1 stays
    last = example.amax(apart, keepdim=True)
    found = last[last >= 0]
    one_each = bool(((example == last) | (example < 0)).all())
    return one_each and _differ(found)


# --- groups ---------------------------------------------------------------------------------------


def tidied(groups: Iterable[Group]) -> Groups:
    """Groups whose places differ, and in which a source has no more places than it needs."""
    merged: list[Group] = []
    for group in groups:
        for i, kept in enumerate(merged):
            if same(kept.places, group.places):
                skips = dict(kept.skips)
                for source, skip in group.skips.items():
                    skips[source] = skips.get(source, 0.0) + skip
                merged[i] = Group(kept.places, skips)
                break
        else:
            merged.append(group)
    if len(merged) > 1 and len({s for g in merged for s in g.skips}) < sum(
        len(g.skips) for g in merged
    ):
        return _unified(merged)
    return tuple(merged)


def _unified(groups: Sequence[Group]) -> Groups:
    """Merge the places of each source that complete each other."""
    entries: dict[int, list[tuple[Tensor, float]]] = {}
    unions: dict[tuple[int, int, bool], tuple[Tensor, Tensor, Tensor | None]] = {}
    for places, skips in groups:
        for source, skip in skips.items():
            _put(entries.setdefault(source, []), places, skip, unions)
    if any(len(found) > MOST for found in entries.values()):
        raise TokensMeet
    by_places: dict[int, Group] = {}
    for source, found in entries.items():
        for places, skip in found:
            by_places.setdefault(id(places), Group(places, {})).skips[source] = skip
    return tuple(by_places.values())


def _put(
    entries: list[tuple[Tensor, float]],
    places: Tensor,
    skip: float,
    unions: dict[tuple[int, int, bool], tuple[Tensor, Tensor, Tensor | None]],
) -> None:
    """Add places of a source to those it has, merged with such as they do not contradict.

    Where the source is a term of one alone, that one must say it of every element.

    Args:
        entries: places and skips of the source, changed in place.
        places, skip: to be added.
        unions: those that are known already, so that sources that share places go on doing so.
    """
    for i, (other, weight) in enumerate(entries):
        if skip == weight:
            key, overlapping = (id(other), id(places), skip == 0), skip == 0
            if key not in unions:
                unions[key] = other, places, _union(other, places, overlapping)
            union = unions[key][2]
        elif not skip and _within(places, other):
            union, skip = other, weight
        elif not weight and _within(other, places):
            union = places
        else:
            union = None
        if union is None and skip and same(other, places):
            union, skip = other, skip + weight
        if union is not None:
            del entries[i]
            _put(entries, union, skip, unions)
            return
    entries.append((places, skip))


def _union(a: Tensor, b: Tensor, overlapping: bool) -> Tensor | None:
    """The places of both, where no element has two different ones; None if one has."""
    apart = (a < 0) | (b < 0)
    fits = apart | (a == b) if overlapping else apart
    return torch.maximum(a, b) if bool(fits.all()) else None


def _within(part: Tensor, whole: Tensor) -> bool:
    """Whether the one set of places says nothing that the other does not."""
    return bool(((part < 0) | (part == whole)).all())


def joined(
    operands: Sequence[Groups], combine: Callable[[Sequence[Tensor | None]], Tensor]
) -> Groups:
    """The groups of a tensor put together from several.

    Args:
        operands: their groups.
        combine: puts their places together, of which None stands for no token at all.
    """
    entries: dict[tuple[int, float], list[list[Tensor]]] = {}
    for i, groups in enumerate(operands):
        for places, skips in groups:
            for key in skips.items():
                entries.setdefault(key, [[] for _ in operands])[i].append(places)
    combined: dict[tuple[int, ...], tuple[Tensor, list[tuple[int, float]]]] = {}
    for key, found in entries.items():
        for turn in range(max(map(len, found))):
            chosen = [places[turn] if turn < len(places) else None for places in found]
            ids = tuple(map(id, chosen))
            if ids not in combined:
                combined[ids] = combine(chosen), []
            combined[ids][1].append(key)
    return tidied(Group(places, dict(keys)) for places, keys in combined.values())


def _nowhere(like: Tensor, dims: int) -> Tensor:
    return like.new_full((1,) * dims, -1)


def _alike(call: Call, groups: Groups) -> list[Groups]:
    return [groups] * len(call.results)


def each(call: Call, move: Callable[[Tensor], Tensor]) -> list[Groups]:
    """The one result, whose places are those of the first operand, moved."""
    groups = tuple(Group(move(places), skips) for places, skips in call.groups(call.first))
    return _alike(call, tidied(groups) if len(groups) > 1 else groups)


# --- moves ----------------------------------------------------------------------------------------


def kept(call: Call) -> Sequence[Groups]:
    """Casts, copies, moves to other devices."""
    return _alike(call, call.groups(call.first))


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
        return _looked_up(call, index) if dim % call.results[0].dim() == 0 else _meet()
    return each(call, lambda p: p if p.size(dim) == 1 else p.index_select(dim, index))


def gathered(call: Call) -> Sequence[Groups]:
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if call.name == "take_along_dim":
        index, dim = call.argument(1, "indices"), call.argument(2, "dim")
        if dim is None:
            return taken(call)
        index = index.expand(call.results[0].shape)
    if call.groups(index):
        raise TokensMeet
    shape = call.shape(call.first)

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
        return _looked_up(call, ids[0]) if alone and not call.groups(x) else _meet()
    if not call.groups(x):
        return [()]
    shape = call.shape(x)
    if not any(True for _ in tensors((index,))) and not _holds_list(index):
        return taken(call)
    where, used = _leading(index, len(shape))
    return each(call, lambda p: p.expand(shape[:used] + p.shape[used:])[where])


def _holds_list(index: Any) -> bool:
    plain = isinstance(index, int | slice | type(None) | type(...))
    return not plain and not (isinstance(index, tuple) and not any(_holds_list(i) for i in index))


def _leading(index: Any, dims: int) -> tuple[tuple[Any, ...], int]:
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
    return _meet() if len(ids) > 1 or ids[0].is_floating_point() else _looked_up(call, ids[0])


def _looked_up(call: Call, ids: Tensor) -> Sequence[Groups]:
    added = (1,) * (call.results[0].dim() - ids.dim())
    return [tuple(Group(p.reshape(p.shape + added), s) for p, s in call.groups(ids))]


def _meet() -> Sequence[Groups]:
    raise TokensMeet


def padded(call: Call) -> Sequence[Groups]:
    x, pads = call.first, call.argument(1, "pad")
    mode = call.argument(2, "mode", "constant") if call.name == "pad" else "constant"
    shape = call.shape(x)
    grown = {len(shape) - 1 - i // 2 for i, amount in enumerate(pads) if amount > 0}

    def move(places: Tensor) -> Tensor:
        if mode != "constant":
            given = places.expand(shape).double()
            return thinned(F.pad(given, pads, mode).to(places.dtype))
        sizes = [
            n if d in grown else p for d, (n, p) in enumerate(zip(shape, places.shape, strict=True))
        ]
        cut = [
            amount if sizes[len(shape) - 1 - i // 2] > 1 or amount > 0 else 0
            for i, amount in enumerate(pads)
        ]
        return F.pad(places.expand(sizes), cut, value=-1)

    return each(call, move)


def triangle(call: Call) -> Sequence[Groups]:
    """tril and triu."""
    shape = call.shape(call.first)
    return each(call, lambda p: thinned(call.again(call.first, p.expand(shape) + 1)[0] - 1))


# --- joins ----------------------------------------------------------------------------------------


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
        out.append((_nowhere(like, like.dim()) if piece is None else piece).expand(common))
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

    def combine(pieces: Sequence[Tensor | None]) -> Tensor:
        like = next(p for p in pieces if p is not None)
        a, b = (_nowhere(like, 0) if p is None else p for p in pieces)
        return aligned(torch.where(condition, a, b), call.results[0].dim())

    return [joined([call.groups(x), call.groups(other)], combine)]


def masked_fill(call: Call) -> Sequence[Groups]:
    mask, value = call.argument(1, "mask"), call.argument(2, "value")
    if call.groups(value):
        raise TokensMeet
    dims = call.results[0].dim()
    return each(call, lambda p: aligned(torch.where(mask, _nowhere(p, 0), p), dims))


def index_fill(call: Call) -> Sequence[Groups]:
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
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
    where, used = _leading(index, len(shape))

    def combine(pieces: Sequence[Tensor | None]) -> Tensor:
        like = next(p for p in pieces if p is not None)
        base, new = (
            _nowhere(like, n) if p is None else p
            for p, n in zip(pieces, (len(shape), 0), strict=True)
        )
        behind = new.shape[max(0, new.dim() - len(shape) + used) :]
        rest = torch.broadcast_shapes(base.shape[used:], behind)
        base = base.expand(shape[:used] + rest).clone()
        base[where] = new
        return base

    return [joined([call.groups(x), call.groups(value)], combine)]


def _accumulated(call: Call, index: Any, value: Any) -> Sequence[Groups]:
    x = call.first
    shape = call.shape(x)
    flat = torch.arange(shape.numel(), device=x.device).view(shape)[index]

    def put(places: Tensor) -> Tensor:
        blank = places.new_full((shape.numel(),), -1)
        return blank.scatter_reduce(0, flat.flatten(), places.flatten(), "amax").view(shape)

    return _added(call, x, value, flat.shape, flat, put, lambda laid: laid[index])


def index_add(call: Call) -> Sequence[Groups]:
    x, dim = call.first, call.argument(1, "dim")
    index, value = call.argument(2, "index"), call.argument(3, "source tensor")
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
    index, value = call.argument(2, "index"), call.argument(3, "src")
    shape = call.shape(x)

    def put(places: Tensor) -> Tensor:
        return places.new_full(shape, -1).scatter_reduce(dim, index, places, "amax")

    def spread(places: Tensor) -> Tensor:
        return places.expand(call.shape(value))[tuple(map(slice, index.shape))]

    cells = torch.arange(shape.numel(), device=index.device).view(shape).gather(dim, index)
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
    once = is_term and call.kwargs.get("alpha", 1) == 1 and _differ(cells)
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


def _differ(numbers: Tensor) -> bool:
    return len(set(numbers.flatten().tolist())) == numbers.numel()


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
            id(x): (_nowhere(like, len(call.shape(x))) if p is None else p).expand(call.shape(x))
            for x, p in zip(operands, pieces, strict=True)
        }
        first = id(call.first)  # perhaps written to
        if first in stand_ins:
            stand_ins[first] = stand_ins[first].clone(memory_format=torch.contiguous_format)

        def stand_in(given: Any) -> Any:
            if isinstance(given, tuple | list):
                return type(given)(map(stand_in, given))
            return stand_ins.get(id(given), -1 if given is number is not None else given)

        kwargs = {k: stand_in(v) for k, v in call.kwargs.items()}
        return thinned(next(tensors((call.func(*map(stand_in, call.args), **kwargs),))))

    return [joined([call.groups(x) for x in operands], combine)]


def copied(call: Call) -> Sequence[Groups]:
    """x.copy_(source), x.data = source."""
    source, dims = call.argument(1, "src"), call.results[0].dim()
    return [tuple(Group(aligned(p, dims), skips) for p, skips in call.groups(source))]


# --- element by element ---------------------------------------------------------------------------


def union(call: Call, operands: Iterable[Any], settle: Iterable[int] = ()) -> Groups:
    """The places of all operands, broadcast, and settled along dimensions of the result."""
    groups: list[Group] = []
    operands = [x for x in operands if call.groups(x)]
    for x in operands:
        dims = max(call.results[0].dim(), len(call.shape(x)))
        groups += (g.through(settled(aligned(g.places, dims), settle)) for g in call.groups(x))
    return tuple(groups) if len(operands) == 1 and not settle else tidied(groups)


def pointwise(call: Call) -> Sequence[Groups]:
    operands = {id(x): x for x in tensors((*call.args, *call.kwargs.values()))}
    return _alike(call, union(call, operands.values()))


def summed(call: Call) -> Sequence[Groups]:
    """Sums and differences of two."""
    x, other = call.argument(0, "input self"), call.argument(1, "other")
    dims, weights = call.results[0].dim(), [1.0, 1.0]
    if call.name in ("sub", "rsub"):
        weights[call.name == "sub"] = -1.0
    if call.kwargs.get("alpha", 1) != 1:
        weights[call.name != "rsub"] = 0.0
    groups = [  # 0 is added so that no skip is -0
        Group(aligned(p, dims), {s: weight * skip + 0.0 for s, skip in skips.items()})
        for operand, weight in zip((x, other), weights, strict=True)
        for p, skips in call.groups(operand)
    ]
    return [tidied(groups)]


def negative(call: Call) -> Sequence[Groups]:
    groups = call.groups(call.first)
    return [tuple(Group(p, {s: 0.0 - k for s, k in skips.items()}) for p, skips in groups)]


def dropout(call: Call) -> Sequence[Groups]:
    """Nothing, unless the model is being trained."""
    chance, training = call.argument(1, "p", 0.5), call.argument(2, "training train", True)
    return pointwise(call) if training and chance else kept(call)


# --- along dimensions -----------------------------------------------------------------------------


def _dims(call: Call, position: int, default: Any, names: str = "dim axis axes") -> tuple[int, ...]:
    """The dimensions that a function works along, by default all."""
    count = len(call.shape(call.first))
    given = call.argument(position, names)
    given = default if given is None or isinstance(given, bool) else given
    if given is None or given == ():
        return tuple(range(count))
    given = (given,) if isinstance(given, int) else given
    return tuple(dim % count for dim in given if count)


def _reduced(call: Call, dims: tuple[int, ...]) -> Sequence[Groups]:
    """One number, or as many as there were, from all along ``dims``."""
    operands = [x for x in tensors((*call.args, *call.kwargs.values())) if call.groups(x)]
    count = len(call.shape(call.first))
    try:
        groups = union(call, operands, dims)
    except TokensMeet:
        if call.name not in POOLS:
            raise
        whole = all(is_whole(g, dims, call) for g in call.groups(call.first))
        raise TokensMeet(pooled=whole) from None
    if call.results[0].dim() < count:
        groups = tuple(Group(p.squeeze(dims), skips) for p, skips in groups)
    return _alike(call, groups)


def along(position: int, default: Any = None) -> Rule:
    """A rule for functions along dimensions.

    Args:
        position: of the argument that names them.
        default: what they are without it; None for all. Default: None.
    """
    return lambda call: _reduced(call, _dims(call, position, default))


def extremum(call: Call) -> Sequence[Groups]:
    """max and min: of two tensors, or along a dimension."""
    two = isinstance(call.argument(1, "other"), Tensor)
    return pointwise(call) if two else _reduced(call, _dims(call, 1, None))


def last_dims(call: Call) -> Sequence[Groups]:
    """layer_norm and rms_norm."""
    count = len(call.shape(call.first))
    return _reduced(call, tuple(range(count - len(call.argument(1, "normalized_shape")), count)))


def behind_first(call: Call) -> Sequence[Groups]:
    """group_norm: of one example."""
    return _reduced(call, tuple(range(1, len(call.shape(call.first)))))


def of_images(call: Call) -> Sequence[Groups]:
    """instance_norm: of one channel of one example."""
    return _reduced(call, tuple(range(2, len(call.shape(call.first)))))


def batch_norm(call: Call) -> Sequence[Groups]:
    if not call.argument(5, "training", False):
        return pointwise(call)
    dims = range(len(call.shape(call.first)))
    return _reduced(call, tuple(d for d in dims if d != 1))


def pooling(call: Call) -> Sequence[Groups]:
    """Pools over windows of the last dimensions, of which the function's name tells the number."""
    count = len(call.shape(call.first))
    dims = tuple(range(count - int(call.name[-2]), count))
    groups = call.groups(call.first)
    if all(g.places.size(d) == 1 for g in groups for d in dims):
        return _alike(call, tuple(g.through(g.places) for g in groups))
    whole = all(call.results[0].shape[d] == 1 for d in dims)
    raise TokensMeet(pooled=whole and all(is_whole(g, dims, call) for g in groups))


def as_complex(call: Call) -> Sequence[Groups]:
    """Pairs of numbers as one."""
    return [tuple(g.through(settled(g.places, (-1,)).squeeze(-1)) for g in call.groups(call.first))]


def as_real(call: Call) -> Sequence[Groups]:
    return [tuple(g.through(g.places.unsqueeze(-1)) for g in call.groups(call.first))]


# --- products -------------------------------------------------------------------------------------

Labels = Sequence[Any]


def _contracted(
    call: Call, factors: Sequence[tuple[Any, Labels]], out: Labels, summands: Iterable[Any] = ()
) -> Sequence[Groups]:
    """A product of factors with labelled dimensions; those that ``out`` lacks are summed over."""
    groups = [g for x in summands for g in union(call, [x])]
    for x, labels in factors:
        if not call.groups(x):
            continue
        if len(set(labels)) < len(labels):
            raise TokensMeet  # a diagonal
        ours = [label for label in out if label in labels]
        gone = [d for d, label in enumerate(labels) if label not in out]
        order = [labels.index(label) for label in ours]
        new = tuple(slice(None) if label in labels else None for label in out)
        for group in call.groups(x):
            places = settled(group.places, gone).permute(order + gone)[(..., *(0,) * len(gone))]
            groups.append(group.through(places[new]))
    return [tidied(groups)]


def _of_matrices(call: Call, a: Any, b: Any, summands: Iterable[Any] = ()) -> Sequence[Groups]:
    m, n = len(call.shape(a)), len(call.shape(b))
    batch = list(range(-max(m, n), -2))
    left = [*batch[len(batch) + 2 - m :], "i", "k"] if m > 1 else ["k"]
    right = [*batch[len(batch) + 2 - n :], "k", "j"] if n > 1 else ["k"]
    out = [*batch, *"i" * (m > 1), *"j" * (n > 1)]
    return _contracted(call, [(a, left), (b, right)], out, summands)


def matmul(call: Call) -> Sequence[Groups]:
    a, b = call.argument(0, "input self"), call.argument(1, "other mat2 vec tensor")
    return _of_matrices(call, *((b, a) if call.name == "__rmatmul__" else (a, b)))


def with_summand(call: Call) -> Sequence[Groups]:
    """addmm, baddbmm and addmv."""
    a = call.argument(1, "mat1 batch1 mat")
    return _of_matrices(call, a, call.argument(2, "mat2 batch2 vec"), [call.first])


def linear(call: Call) -> Sequence[Groups]:
    x, weight, bias = call.first, call.argument(1, "weight"), call.argument(2, "bias")
    before = list(range(len(call.shape(x)) - 1))
    rows = ["j"] if len(call.shape(weight)) > 1 else []
    factors = [(x, [*before, "k"]), (weight, [*rows, "k"])]
    return _contracted(call, factors, [*before, *rows], [bias])


def grouped_mm(call: Call) -> Sequence[Groups]:
    """Rows times the matrix of the group that they are in."""
    x, weight = call.first, call.argument(1, "weight mat_b mat2")
    rows, matrices = len(call.shape(x)), len(call.shape(weight))
    if call.groups(weight) or matrices != 3:
        raise TokensMeet
    labels = ["t", "k"] if rows == 2 else ["g", "t", "k"]
    return _contracted(call, [(x, labels)], ["g", "t", "j"][3 - call.results[0].dim() :])


def einsum(call: Call) -> Sequence[Groups]:
    equation, *operands = call.args
    if not isinstance(equation, str):
        raise TokensMeet
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    equation = equation.replace(" ", "")
    given, arrow, out = equation.partition("->")
    terms = given.split(",")
    if not arrow:
        letters = given.replace(",", "").replace(".", "")
        out = "..." * ("..." in given) + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    counts = [
        len(call.shape(x)) - len(t.replace("...", "")) for x, t in zip(operands, terms, strict=True)
    ]

    def labels(term: str, count: int) -> list[Any]:
        before, _, behind = term.partition("...")
        return [*before, *range(-count, 0), *behind] if "..." in term else list(term)

    factors = [(x, labels(t, n)) for x, t, n in zip(operands, terms, counts, strict=True)]
    return _contracted(call, factors, labels(out, max(counts)))


def outer(call: Call) -> Sequence[Groups]:
    a, b = call.args
    return _contracted(call, [(a, ["i"]), (b, ["j"])], ["i", "j"])


def attention(call: Call) -> Sequence[Groups]:
    """scaled_dot_product_attention."""
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    batch = list(range(2 - len(call.shape(query)), 0))
    mask = call.argument(3, "attn_mask")
    if call.groups(mask) or len({len(call.shape(x)) for x in (query, key, value)}) > 1:
        raise TokensMeet
    factors = [(query, [*batch, "l", "e"]), (key, [*batch, "s", "e"]), (value, [*batch, "s", "f"])]
    return _contracted(call, factors, [*batch, "l", "f"])


def convolution(call: Call) -> Sequence[Groups]:
    """Channels are mixed; positions are not by a kernel of size 1, nor where all are one token."""
    x, weight = call.first, call.argument(1, "weight")
    count = int(call.name[-2])
    if call.groups(weight) or call.groups(call.argument(2, "bias")):
        raise TokensMeet
    if len(call.shape(x)) != count + 2:
        raise TokensMeet
    stride, padding = call.argument(3, "stride", 1), call.argument(4, "padding", 0)
    by_channel = weight.shape[1] == 1 and call.argument(6, "groups", 1) == weight.shape[0]

    def move(places: Tensor) -> Tensor:
        places = places if by_channel else settled(places, (1,))
        for i in range(count):
            if places.size(2 + i) == 1:
                continue
            step = stride if isinstance(stride, int) else stride[i % len(stride)]
            pad = padding if isinstance(padding, int | str) else padding[i % len(padding)]
            if weight.shape[2 + i] > 1 or pad not in (0, "valid", "same"):
                raise TokensMeet
            places = places[(slice(None),) * (2 + i) + (slice(None, None, step),)]
        return places

    return [tidied(g.through(move(g.places)) for g in call.groups(x))]


def strided(call: Call) -> Sequence[Groups]:
    """as_strided, of places that lie in memory as the tensor does."""
    x, shape = call.first, call.shape(call.first)
    if not x.is_contiguous() or x.storage_offset():
        raise TokensMeet
    return each(call, lambda p: thinned(call.again(x, p.expand(shape).contiguous())[0]))


def constant(call: Call) -> Sequence[Groups]:
    """What does not depend on its operands' numbers."""
    return [()] * len(call.results)


# --- names ----------------------------------------------------------------------------------------

#: Python's operators and other names, by the function they stand for.
ALIASES = {
    "__radd__": "add", "__iadd__": "add_", "__isub__": "sub_", "subtract": "sub",
    "__rmul__": "mul", "__imul__": "mul_", "multiply": "mul",
    "__truediv__": "div", "__itruediv__": "div_", "__idiv__": "div_", "__rtruediv__": "div",
    "__rdiv__": "div", "true_divide": "div", "divide": "div", "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide", "__mod__": "remainder", "__rmod__": "remainder",
    "__ipow__": "pow_", "__rpow__": "pow", "float_power": "pow", "negative": "neg",
    "concat": "cat", "concatenate": "cat", "absolute": "abs", "clip": "clamp",
    "_threshold": "threshold", "expit": "sigmoid", "_grouped_mm": "grouped_mm",
    "grouped_mm_fallback": "grouped_mm", "_index_put_impl_": "index_put_",
}  # fmt: skip

#: In front of the names of functions in torch.linalg, torch.fft and torch.special.
PREFIXES = ("linalg_", "fft_", "special_")

KEPT = """
    to type type_as float double half bfloat16 cfloat cpu cuda clone contiguous detach alias
    requires_grad_ pin_memory resolve_conj resolve_neg conj conj_physical positive
    __deepcopy__ __copy__ _to_copy long int short data
"""
TAKEN = """
    chunk split split_with_sizes tensor_split hsplit vsplit dsplit unsafe_chunk unsafe_split
    unbind narrow select slice unfold diagonal masked_select pixel_shuffle pixel_unshuffle rot90
    channel_shuffle
"""
REORDERED = """
    permute transpose t swapaxes swapdims movedim moveaxis adjoint flip fliplr flipud __reversed__
    T mT H mH
"""
RESHAPED = """
    view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze atleast_1d atleast_2d
    atleast_3d _unsafe_view
"""
BROADCAST = "expand expand_as broadcast_to broadcast_tensors"
TOGETHER = """
    masked_scatter index_copy scatter slice_scatter select_scatter diagonal_scatter hstack vstack
    dstack column_stack row_stack
"""
POINTWISE = """
    mul div pow abs square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos
    atan sinh cosh tanh asinh acosh atanh atan2 arctan arctan2 arcsin arccos arcsinh arctanh sigmoid
    logit log_sigmoid logsigmoid softplus softsign silu swish gelu relu relu6 leaky_relu prelu elu
    selu celu mish hardswish hardsigmoid hardtanh hardshrink softshrink tanhshrink threshold rrelu
    clamp clamp_min clamp_max maximum minimum fmax fmin erf erfc erfinv sinc reciprocal sign sgn
    floor ceil round trunc fix frac fmod remainder floor_divide nan_to_num lerp addcmul addcdiv
    logaddexp logaddexp2 hypot xlogy xlog1py copysign bernoulli deg2rad rad2deg real imag angle
    complex polar lgamma digamma i0 i0e i1 i1e ndtr log_ndtr heaviside dequantize entr
    fake_quantize_per_tensor_affine
"""
SUMS = "add sub rsub __add__ __sub__ __rsub__"
DROPOUT = """
    dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout
"""

#: Functions that pool, if they do so over all tokens.
POOLS = frozenset({"sum", "mean", "nansum", "nanmean", "amax", "amin", "max", "min"})

#: Functions along dimensions: the position of the argument that names these, and what they are
#: without it.
ALONG: tuple[tuple[int, Any, str], ...] = (
    (1, None, """
        sum mean nansum nanmean amax amin aminmax prod logsumexp median nanmedian var std var_mean
        std_mean softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp"""),
    (1, -1, "sort glu mode"),
    (2, None, "norm vector_norm fftn ifftn rfftn irfftn"),
    (2, -1, "topk kthvalue fft ifft rfft irfft diff"),
    (2, 1, "normalize cosine_similarity"),
    (2, (-2, -1), "matrix_norm fft2 ifft2 rfft2 irfft2"),
    (4, -1, "gumbel_softmax"),
)  # fmt: skip

CONSTANT = """
    zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones
    new_full new_tensor zero_ normal_ uniform_ exponential_ bernoulli_ random_ cauchy_
    log_normal_ geometric_ trunc_normal_ grad
"""

#: What their results hold is undefined: if it comes to depend on anything, torch did not see how.
EMPTY = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "empty_permuted", "new_empty_strided"}
)


def plain(name: str) -> str:
    """A function's name without its namespace and overload."""
    name = name.partition(".")[0]
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return ALIASES.get(name, name)


def _table() -> dict[str, Rule]:
    kinds: tuple[tuple[str, Rule], ...] = (
        (KEPT, kept),
        (TAKEN, taken),
        (REORDERED, reordered),
        (RESHAPED, reshaping),
        (BROADCAST, broadcast),
        (TOGETHER, put_together),
        (POINTWISE, pointwise),
        (SUMS, summed),
        (DROPOUT, dropout),
        (CONSTANT, constant),
        ("repeat tile", repeated),
        ("gather take_along_dim", gathered),
        ("tril triu diag_embed", triangle),
        ("pad constant_pad_nd", padded),
        ("__setitem__ index_put", assigned),
        ("copy fill __set__", copied),
        ("layer_norm rms_norm", last_dims),
        ("matmul __matmul__ __rmatmul__ mm bmm mv dot vdot", matmul),
        ("addmm baddbmm addmv", with_summand),
        ("outer ger", outer),
        ("conv1d conv2d conv3d", convolution),
        ("max min", extremum),
    )
    rules = {name: rule for names, rule in kinds for name in names.split()}
    for position, default, names in ALONG:
        rules.update(dict.fromkeys(names.split(), along(position, default)))
    pools = ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    rules |= {f"{pool}{n}d": pooling for pool in pools for n in (1, 2, 3)}
    return rules | {
        "roll": rolled,
        "repeat_interleave": interleaved,
        "index_select": selected,
        "__getitem__": item,
        "embedding": lookup,
        "cat": cat,
        "stack": stack,
        "where": where,
        "masked_fill": masked_fill,
        "index_fill": index_fill,
        "index_add": index_add,
        "scatter_add": scatter_add,
        "neg": negative,
        "__neg__": negative,
        "__pow__": pointwise,
        "__mul__": pointwise,
        "group_norm": behind_first,
        "instance_norm": of_images,
        "batch_norm": batch_norm,
        "view_as_complex": as_complex,
        "view_as_real": as_real,
        "linear": linear,
        "grouped_mm": grouped_mm,
        "einsum": einsum,
        "scaled_dot_product_attention": attention,
        "as_strided": strided,
    }


RULES = _table()

#: They hand on what they are given, so that of whole numbers, too, places are known.
HANDING = frozenset(
    f"""{KEPT} {TAKEN} {REORDERED} {RESHAPED} {BROADCAST} {TOGETHER} repeat tile gather
    take_along_dim tril triu pad constant_pad_nd __setitem__ index_put copy __set__ roll
    repeat_interleave index_select __getitem__ cat stack where masked_fill index_fill as_strided
    """.split()
)
#: They put what they are given beside, or onto, what is there.
WRITING = frozenset(
    f"{SUMS} __setitem__ index_put index_add scatter_add index_copy scatter masked_scatter".split()
)
