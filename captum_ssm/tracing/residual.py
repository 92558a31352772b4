"""The residual stream: what enters a block that holds a mixer, and what mixers are added to.

Where tokens are followed, sums tell what the output of a mixer was added to, wherever in the model
that was.  Else it is taken for what entered the block that holds the mixer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..operators.kernels.arithmetic import sum_tensors, unseen
from ..operators.kernels.rows import tokens_at
from ..operators.kernels.truths import holds
from .layer import Layer, same_memory
from .offload import brought_in
from .places import Origin, Places
from .places.calls import Term, terms_of
from .places.chain import Read
from .places.rules.groups import plain_number
from .way import STEPS, Step, Terms, Way, Ways, along

#: Norms that some models put before the first of their blocks, inside of it (RWKV).
_OPENING_NORMS = ("pre_ln", "pre_norm")
#: Marks blocks that add the mixer's output to what they hand to the mixer (MiniMax).
ADDS_TO_NORMED = "attn_alpha_factor"


def residual_stream(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The stream that a call of a block goes on from, (B, L, E); None if it is given no tensor.

    Args:
        block: the block.
        args, kwargs: of its call.
    """
    stream = first_floating((*args, *kwargs.values()))
    if stream is None:
        return None
    # mamba_ssm's blocks receive the last mixer's output and the rest of the stream apart
    earlier = _argument(block, "residual", args, kwargs)
    if isinstance(earlier, Tensor):
        stream = stream + earlier
    for name in _OPENING_NORMS:
        norm = getattr(block, name, None)
        if norm is not None:
            with brought_in(block):
                stream = norm(stream)
    return stream


def first_floating(values: Iterable[Any]) -> Tensor | None:
    """The first floating tensor among values, or None."""
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


def _argument(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The argument called ``name``, however it was passed; None if there is none."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else kwargs.get(name)


@dataclass(frozen=True, eq=False)
class _Sum:
    """What the output of a mixer was added to.

    Attributes:
        other: it, by the mixer's tokens (B, L, E), without outputs of others that no mixer had read
            yet.
        without: those others, by number.
        sources: where the rest comes from.
        is_stream: whether it is known to be a residual stream, of which one of them is a term, or
            which entered a module around the mixer; what a part such as an MLP returns is neither.
        way: what was done to the output before; None if that is not known.
    """

    other: Tensor
    without: frozenset[int]
    sources: frozenset[int]
    is_stream: bool
    way: Way | None


class Sums:
    """Sees what the outputs of mixers are added to.

    Args:
        follow: follows their tokens.
        layers: the mixers that have returned.
    """

    def __init__(self, follow: Places, layers: Sequence[Layer]) -> None:
        self._follow, self._layers = follow, layers
        #: Those by number whose output no mixer has read yet.
        self._open: set[int] = set()
        #: Those of them that were seen in no residual stream.
        self._apart: set[int] = set()
        self._found: dict[int, list[_Sum]] = {}
        #: What was done to the outputs of mixers that were added to each other.
        self._beside: dict[int, Way | None] = {}
        #: Those that were added to what they had been added to before.
        self._repeated: set[int] = set()
        self._entered: dict[nn.Module, Tensor] = {}
        self._ways = Ways(self._terms_apart, self._output_at)
        follow.tell.update(dict.fromkeys(STEPS, self._told))

    def enters(self, module: nn.Module, x: Tensor | None) -> None:
        """Note what enters a module around mixers."""
        if x is not None:
            self._entered[module] = x.detach()

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Leave out sums that are none of the model's."""
        before, self._open = self._open, set()
        try:
            yield
        finally:
            self._open = before

    def read(self, entering: Origin | None) -> None:
        """Note what a mixer reads: it has been added to what it belongs to."""
        if entering is not None:
            # what others have mixed does not tell any more what it holds
            self._open -= self._open if entering.mixed else _sources(entering)
            self._close(self._open)

    def left(self, number: int) -> None:
        """Note that the output of a mixer is there."""
        self._open.add(number)
        self._apart.add(number)

    def _close(self, still: Iterable[int]) -> None:
        """Follow the ways of no others than these any more."""
        self._apart.intersection_update(still)
        if not self._apart:
            self._ways.forget()

    def settle(self, reads: Sequence[Read]) -> None:
        """Tell the layers what their outputs were added to.

        Args:
            reads: what they read; those that read the same belong together.
        """
        self._entered.clear()
        stages: dict[frozenset[int], list[int]] = {}
        for number, read in enumerate(reads, 1):
            if read.entering is not None:  # one whose tokens others have mixed is by itself
                mixed = read.entering.mixed is not None
                key = {-number} if mixed else _sources(read.entering)
                stages.setdefault(frozenset(key), []).append(number)
        for stage in map(frozenset, stages.values()):
            holder: Layer | None = None
            for number in sorted(stage):
                layer = self._layers[number - 1]
                found = [s for s in self._found.get(number, ()) if s.without <= stage]
                if not found:
                    # what is alone is a term of nothing, and mixers beside it of nothing together
                    if number in self._beside or len(stage) > 1:
                        layer.join(None, self._beside.get(number))
                    continue
                stream = _stream(found)
                if stream is not None:
                    holder, layer.residual = layer, stream.other
                ways = [s.way for s in (*found, stream) if s is not None and s.way is not None]
                known = bool(ways) and number not in self._repeated
                layer.join(holder, ways[-1] if known else None)
        # for this object and its ways refer to each other
        self._layers = ()
        self._ways.forget()
        self._found.clear()

    def _told(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """Note a sum or a difference, before it is made, and steps on the way into one."""
        terms = terms_of(name, args, kwargs) if self._open and name in ("add", "sub") else None
        if terms is not None:
            self._see(*terms)
        return self._ways.told(name, args, kwargs) if self._open & self._apart else None

    def _output_at(self, number: int, places: Tensor) -> Tensor:
        return tokens_at(self._layers[number - 1].output.detach(), places)

    def _terms_apart(self, x: Tensor) -> Terms | None:
        """What comes from mixers that have not joined the stream yet."""
        origin = self._follow.origin(x)
        if origin is None or origin.mixed is not None:
            return None
        places = _places(origin, self._open & self._apart & _sources(origin))
        return Terms(places, {n: _skip(origin, n) for n in places}) if places else None

    def _see(self, one: Term, other: Term) -> None:
        if one[0].shape != other[0].shape or one[0].dim() != 3:
            return
        for (mine, weight), (rest, beside) in ((one, other), (other, one)):
            origin, rests = self._follow.origin(mine), self._follow.origin(rest)
            if origin is None or rests is None or origin.mixed:
                continue
            numbers = self._open & _sources(origin) - _sources(rests)
            # to a stream that holds them, and not by way of it, as through an MLP
            if _sources(origin) <= self._open and not _sources(rests) <= self._open:
                self._repeated |= _sources(origin) & _sources(rests)
            with unseen(), torch.no_grad():
                places = _places(origin, numbers)
                if not places:
                    continue
                ways = self._ways_to(mine, origin, places, weight)
                whole = rest.detach() if beside == 1 else beside * rest.detach()
                whole, without = self._without_open(whole, rests)
                sources = frozenset(_sources(rests) - without)
                # mixers that join the stream together, if there is one
                if not rests.mixed and sources <= self._open:
                    self._beside.update(ways)
                    continue
                is_term = any(g.skips.get(s) for g in rests.groups for s in sources)
                is_stream = is_term or any(same_memory(rest, x) for x in self._entered.values())
                alone = _sources(origin) <= self._open
                for number, place in places.items():
                    own = tokens_at(whole, place.argsort(1))
                    before = self._found.setdefault(number, [])
                    # a sum of two that is made again is no other stream
                    if not (alone and any(_is_same(sum.other, own) for sum in before)):
                        before.append(_Sum(own, without, sources, is_stream, ways[number]))
                if is_stream:
                    self._close(self._apart - places.keys())

    def _ways_to(
        self, mine: Tensor, origin: Origin, places: Mapping[int, Tensor], weight: float
    ) -> dict[int, Way | None]:
        """What was done to the outputs of mixers to make a term of a sum, by their numbers.

        Args:
            mine: the term, before it is multiplied with its weight.
            origin: where it comes from.
            places: of the mixers' tokens in it, by the number of the mixer.
            weight: its weight.
        """
        skips = {number: _skip(origin, number) for number in places}
        layers = [self._layers[number - 1] for number in places]
        is_output = len(layers) == 1 and same_memory(mine, layers[0].output)
        # a term beside another part of the block, such as an MLP, is not told by its numbers
        if is_output or (all(skips.values()) and _sources(origin) != places.keys()):
            return {number: [Step(weight * skip)] for number, skip in skips.items()}
        ways = self._ways.to(mine, places)
        if ways is None:
            return dict.fromkeys(places)
        return {n: [*_in_own_order(way, places[n]), Step(weight)] for n, way in ways.items()}

    def _without_open(self, x: Tensor, origin: Origin) -> tuple[Tensor, frozenset[int]]:
        """A term of a sum without what is in it of outputs that no mixer has read yet, and these.

        That is what their ways into another sum have led to.
        """
        places = _places(origin, self._open & _sources(origin))
        ways = {number: self._latest_way(number) for number in places}
        if any(way is None for way in ways.values()):
            return x, frozenset()
        for number, place in places.items():
            joined = along(ways[number] or (), self._layers[number - 1].output.detach())
            if joined.shape != x.shape:
                return x, frozenset()
            x = x - tokens_at(joined, place).to(x.device)
        return x, frozenset(places)

    def _latest_way(self, number: int) -> Way | None:
        """What was done to an output before it joined the latest sum."""
        found = self._found.get(number)
        return found[-1].way if found else self._beside.get(number)


def _stream(found: Sequence[_Sum]) -> _Sum | None:
    """The residual stream among what an output was added to; None if that is not clear."""
    known = [s for s in found if s.is_stream]
    streams = [s for s in found if s in known or any(_is_same(s.other, k.other) for k in known)]
    if len(streams) > 1:
        last = streams[-1]
        return replace(last, other=sum_tensors(s.other.to(last.other.device) for s in streams))
    streams = streams or [*found]
    return streams[0] if len(streams) == 1 else None


def _sources(origin: Origin) -> set[int]:
    return {plain_number(source) for group in origin.groups for source in group.skips}


def _places(origin: Origin, numbers: Iterable[int]) -> dict[int, Tensor]:
    """Where mixers' tokens are, by their numbers; nothing if those of one are not all there."""
    found = {number: origin.permutation(number) for number in numbers}
    complete = {number: place for number, place in found.items() if place is not None}
    return complete if len(complete) == len(found) else {}


def _skip(origin: Origin, source: int) -> float:
    return sum(group.skips.get(source, 0.0) for group in origin.groups)


def _is_same(other: Tensor, stream: Tensor) -> bool:
    """Whether what an output was added to is the stream, told by its numbers.

    Else it is what another part of the block returned, as on a device it is taken to be.
    """
    if other.shape != stream.shape or not other.numel():
        return False
    return not holds(~_alike(other, stream.to(other.device)))


def _alike(x: Tensor, y: Tensor) -> Tensor:
    """Whether two tensors are the same but for the rounding of a sum."""
    return (x - y).abs().max() <= 8 * torch.finfo(x.dtype).eps * x.abs().max()


def _in_own_order(way: Way, place: Tensor) -> Way:
    """A way by the tokens of a mixer that are at places (B, L) of what it leads to."""
    return [step.reordered(lambda x: tokens_at(x, place.argsort(1))) for step in way]
