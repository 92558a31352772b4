"""The residual stream: what enters a block that holds a mixer, and what mixers are added to.

Where tokens are followed, sums tell what the output of a mixer was added to, wherever in the model
that was.  Else it is taken for what entered the block that holds the mixer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..operators.kernels.arithmetic import unseen
from .layer import Layer
from .places import Origin, Places
from .places.chain import Read

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
        other: it, by the mixer's tokens (B, L, E); empty where nobody asks for it.
        sources: where it comes from.
        is_term: whether one of them is a term of it, as of a residual stream, of which what comes
            out of a part such as an MLP is but a function.
        scale: what the output was multiplied with; None if something else was done to it.
    """

    other: Tensor
    sources: frozenset[int]
    is_term: bool
    scale: float | Tensor | None


class Sums:
    """Sees what the outputs of mixers are added to.

    Args:
        follow: follows their tokens.
        layers: the mixers that have returned.
        keep: whether the streams are wanted, and not what mixers are multiplied with alone.
    """

    def __init__(self, follow: Places, layers: Sequence[Layer], keep: bool) -> None:
        self._follow, self._layers, self._keep = follow, layers, keep
        #: Those by number whose output no mixer has read yet.
        self._open: set[int] = set()
        self._found: dict[int, list[_Sum]] = {}
        follow.on_sum = self._see

    def read(self, entering: Origin | None) -> None:
        """Note what a mixer reads: it has been added to what it belongs to."""
        if entering is not None:
            self._open -= _sources(entering)

    def left(self, number: int) -> None:
        """Note that the output of a mixer is there."""
        self._open.add(number)

    def settle(self, reads: Sequence[Read]) -> None:
        """Tell the layers what their outputs were added to.

        Args:
            reads: what they read; those that read the same belong together.
        """
        stages: dict[frozenset[int], list[int]] = {}
        for number, read in enumerate(reads, 1):
            if read.entering is not None and read.entering.mixed is None:
                stages.setdefault(frozenset(_sources(read.entering)), []).append(number)
        for stage in map(frozenset, stages.values()):
            holder: Layer | None = None
            for number in sorted(stage):
                layer = self._layers[number - 1]
                found = [s for s in self._found.get(number, ()) if not s.sources <= stage]
                if not found:
                    continue
                stream = _stream([s for s in found if s.sources.isdisjoint(stage)])
                if stream is not None and self._keep:
                    holder, layer.residual = layer, stream.other
                layer.join(holder, (found[0] if stream is None else stream).scale)

    def _see(self, one: Tensor, other: Tensor, weights: tuple[float, float]) -> None:
        """Note a sum of two tensors, before it is made.

        Args:
            one, other: the tensors.
            weights: what each is multiplied with.
        """
        if not self._open or one.shape != other.shape or one.dim() != 3:
            return
        for mine, rest, weight in ((one, other, weights[0]), (other, one, weights[1])):
            origin, beside = self._follow.origin(mine), self._follow.origin(rest)
            if origin is None or beside is None or origin.mixed or beside.mixed:
                continue
            numbers = self._open & _sources(origin) - _sources(beside)
            if numbers:
                with unseen(), torch.no_grad():
                    self._note(mine, origin, rest, beside, numbers, weight)

    def _note(
        self,
        mine: Tensor,
        origin: Origin,
        rest: Tensor,
        beside: Origin,
        numbers: set[int],
        weight: float,
    ) -> None:
        places = {number: origin.permutation(number) for number in numbers}
        skips = {number: _skip(origin, number) for number in numbers}
        if any(place is None for place in places.values()):
            return
        scale: float | Tensor | None = None
        if len(set(skips.values())) == 1 and min(skips.values(), key=abs):
            scale = weight * next(iter(skips.values()))
        elif not any(skips.values()) and _sources(origin) == numbers:
            total = sum(
                _gathered(self._layers[n - 1].output.detach(), place)
                for n, place in places.items()
                if place is not None
            )
            scale = _multiple(weight * mine, total)
        is_term = any(map(any, (g.skips.values() for g in beside.groups)))
        for number, place in places.items():
            assert place is not None
            own = _gathered(rest.detach(), place.argsort(1)) if self._keep else rest.new_empty(0)
            found = _Sum(own, frozenset(_sources(beside)), is_term, scale)
            self._found.setdefault(number, []).append(found)


def _stream(found: Sequence[_Sum]) -> _Sum | None:
    """What out of several things to which an output was added is the residual stream."""
    terms = [s for s in found if s.is_term]
    if len(terms) > 1:
        return replace(terms[-1], other=torch.stack([s.other for s in terms]).sum(0))
    one = terms or found
    return one[0] if len(one) == 1 else None


def _sources(origin: Origin) -> set[int]:
    return {source for group in origin.groups for source in group.skips}


def _skip(origin: Origin, source: int) -> float:
    return sum(group.skips.get(source, 0.0) for group in origin.groups)


def _gathered(x: Tensor, places: Tensor) -> Tensor:
    """Tokens of each example (B, L, E) at places (B, L), as a copy."""
    places = places.to(x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], places]


def _multiple(x: Tensor, of: Tensor) -> float | Tensor | None:
    """What a tensor (B, L, E) was multiplied with to give ``x``: a number, or one by feature."""
    limit = 4 * torch.finfo(x.dtype).eps * float(x.abs().max())
    products, squares = (x * of).sum((0, 1)), of.square().sum((0, 1))  # (E,)
    number = products.sum() / squares.sum().clamp_min(torch.finfo(of.dtype).tiny)
    if bool((x - number * of).abs().max() <= limit):
        return float(number)
    features = products / squares.where(squares > 0, 1)
    return features if bool((x - features * of).abs().max() <= limit) else None
