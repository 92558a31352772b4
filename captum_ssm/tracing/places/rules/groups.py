"""Places, and groups of sources that share them: what rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....operators.kernels.truths import read_once

#: How many different tokens of one source an element may come from; beyond that they are mixed.
MOST = 4


#: Beyond all numbers of sources.  One that is only a factor, such as a gate, has this added to its
#: number, and goes its own ways.
GATES = 2**40


class Group(NamedTuple):
    """Sources that share their places, each with its skip."""

    places: Tensor
    skips: dict[int, float]

    def through(self, places: Tensor) -> Group:
        """Other places of the same sources, none of which is a term any more."""
        return Group(places, dict.fromkeys(self.skips, 0.0))

    def gating(self) -> Group:
        """The same of what is only a factor."""
        return Group(self.places, dict.fromkeys(gating(self.skips), 0.0))


Groups = tuple[Group, ...]


def gating(sources: Iterable[int]) -> set[int]:
    """The numbers of sources that are only factors; of memory that nobody saw filled its own."""
    return {s + GATES if 0 <= s < GATES else s for s in sources}


def plain_number(source: int) -> int:
    """The number of a source, whether it is only a factor or not."""
    return source - GATES if source >= GATES else source


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
        args = tuple(stand_in if a is x else on_host(a) for a in self.args)
        kwargs = {k: stand_in if a is x else on_host(a) for k, a in self.kwargs.items()}
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


def on_host(value: Any) -> Any:
    """An index or a mask, however nested, where the places are; of other tensors the shape alone.

    Args:
        value: any argument of a function.
    """
    if isinstance(value, tuple | list):
        return type(value)(map(on_host, value))
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    if value.is_floating_point() or value.is_complex():
        return torch.empty((), dtype=value.dtype, device="cpu").expand(value.shape)
    return read_once("on the host", value.cpu, of=value)


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
    given = tuple(places.shape)
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
        constant = all(size == 1 for size in given[first_i:i])
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
    return one_each and differ(found)


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
    merged = [Group(places, _without_gates(skips)) for places, skips in merged]
    if len(merged) > 1 and len({s for g in merged for s in g.skips}) < sum(
        len(g.skips) for g in merged
    ):
        return _unified(merged)
    return tuple(merged)


def _without_gates(skips: dict[int, float]) -> dict[int, float]:
    """Without factors that are more than that."""
    if max(skips, default=0) < GATES:
        return skips
    return {s: skip for s, skip in skips.items() if s - GATES not in skips}


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
                unions[key] = other, places, united(other, places, overlapping)
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


def united(a: Tensor, b: Tensor, overlapping: bool) -> Tensor | None:
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


def nowhere(like: Tensor, dims: int) -> Tensor:
    return like.new_full((1,) * dims, -1)


def alike(call: Call, groups: Groups) -> list[Groups]:
    return [groups] * len(call.results)


def each(call: Call, move: Callable[[Tensor], Tensor]) -> list[Groups]:
    """The one result, whose places are those of the first operand, moved."""
    if len(call.results) > 1:
        raise TokensMeet
    groups = tuple(Group(move(places), skips) for places, skips in call.groups(call.first))
    return alike(call, tidied(groups) if len(groups) > 1 else groups)


def differ(numbers: Tensor) -> bool:
    return len(set(numbers.flatten().tolist())) == numbers.numel()


def meet() -> Sequence[Groups]:
    raise TokensMeet
