"""Random operators of every kind, and compositions of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from fuzz.operator_leaves import Centre, Given, Kernel, Leafy, Reorder, Scale, Taps
from fuzz.operator_nodes import Beside, InWindows, Node, Product, Total
from fuzz.operator_recurrences import (
    Correction,
    Recurrence,
    ScalarFading,
    Scan,
    Softmax,
    VectorFading,
)
from hypothesis import strategies as st

from captum_ssm.operators import Chain, Shape, Sum
from captum_ssm.operators.combine import DirectSum
from captum_ssm.operators.reorder import Windowed, Windows


class Tree(Protocol):
    """What an operator is made of, before it has a size."""

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        """An operator of this size with random coefficients, and its matrices."""


@dataclass(frozen=True)
class InTurn:
    """A product; the last part acts first."""

    parts: Sequence[Tree]

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        nodes = [part.grow(shape, dtype) for part in self.parts]
        return Product(nodes, Chain(*(node.operator for node in nodes)))


@dataclass(frozen=True)
class Added:
    """A sum."""

    parts: Sequence[Tree]

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        nodes = [part.grow(shape, dtype) for part in self.parts]
        return Total(nodes, Sum(*(node.operator for node in nodes)))


@dataclass(frozen=True)
class BothWays:
    """A tree in either direction, as bidirectional mixers have it."""

    ahead: Tree
    back: Tree
    named: bool

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        flip = Reorder("flip", "scan" if self.named else None)
        return Added([self.ahead, InTurn([flip, self.back, flip])]).grow(shape, dtype)


@dataclass(frozen=True)
class SideBySide:
    """Each part on heads of its own, as far as there are heads."""

    parts: Sequence[Tree]

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        parts = self.parts[: shape.heads]
        each = shape.heads // len(parts)
        counts = [each] * (len(parts) - 1)
        counts.append(shape.heads - sum(counts))
        nodes = [
            part.grow(shape._replace(heads=count), dtype)
            for part, count in zip(parts, counts, strict=True)
        ]
        return Beside(nodes, DirectSum(*(node.operator for node in nodes)))


@dataclass(frozen=True)
class Windowing:
    """A tree within windows of so many places, in which the tokens lie at random."""

    inner: Tree
    size: int
    more: int  # windows than the tokens need

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        count = -(-shape.tokens // self.size) + self.more
        places = torch.full((self.size * count,), -1)
        places[torch.randperm(len(places))[: shape.tokens]] = torch.arange(shape.tokens)
        places = places.view(count, self.size)
        inner = self.inner.grow(shape._replace(batch=shape.batch * count, tokens=self.size), dtype)
        values = torch.randn(inner.operator.shape, dtype=dtype)
        windows = Windows(places)
        operator = Windowed(inner.operator, windows, windows.padding(values))
        return InWindows(inner, places, values, operator)


# --- what is drawn -----------------------------------------------------------------------------

#: One token, few, and a power of two or one more or less: where chunks and tiles end.
FEW = st.one_of(st.integers(1, 12), st.sampled_from([15, 16, 17, 31, 32, 33]))
MANY = st.sampled_from([63, 64, 65, 66, 96, 97, 127, 128, 129, 130, 150, 256, 257, 300])
LENGTHS = st.one_of(*[FEW] * 7, MANY)

_NAMES = st.sampled_from([None, "scan", "gate", "conv", "norm"])
#: Of coefficients; what is all zero hides everything else.
_SIZES = st.sampled_from(["mild"] * 5 + ["mixed"] * 3 + ["huge", "tiny", "zero"])
_LAGS = st.one_of(
    st.lists(st.integers(-3, 4), min_size=1, max_size=4),
    st.lists(st.integers(-100, 100), min_size=1, max_size=2),
)
_VARIES = st.tuples(*[st.booleans()] * 4)

#: Of any number of channels per head.
_ANY: tuple[st.SearchStrategy[Leafy], ...] = (
    st.builds(Scale, _VARIES, _SIZES, _NAMES),
    st.builds(Taps, _LAGS, st.none() | _VARIES, _NAMES),
    st.builds(Kernel, st.sampled_from(["one", "short", "whole", "long"]), st.booleans(), _NAMES),
    st.builds(Reorder, st.sampled_from(["flip", "shift", "any"]), _NAMES),
    st.builds(Given, st.sampled_from(["any", "softmax", "causal"]), _NAMES),
    st.builds(ScalarFading, st.integers(1, 4), st.integers(0, 3), st.booleans(), _SIZES, _NAMES),
    st.builds(VectorFading, st.integers(1, 4), st.booleans(), _SIZES, _NAMES),
    st.builds(
        Correction, st.integers(1, 5), st.sampled_from(["none", "head", "key"]), _SIZES, _NAMES
    ),
)
#: Of one.
_SINGLE: tuple[st.SearchStrategy[Leafy], ...] = (
    st.builds(Scan, st.integers(1, 4), st.integers(0, 3), _SIZES, _SIZES, _NAMES),
    st.builds(Recurrence, _SIZES, _NAMES),
    st.builds(Softmax, _SIZES, _SIZES),
)


def leaves(per_head: int) -> st.SearchStrategy[Leafy]:
    """An elementary operator."""
    if per_head == 1:
        # as often as the others together: the fastest ways are theirs
        return st.one_of(*_SINGLE, *_SINGLE, *_ANY)
    return st.one_of(*_ANY, st.builds(Centre, _NAMES))


def trees(per_head: int) -> st.SearchStrategy[Any]:
    """An operator of any kind."""
    leaf = leaves(per_head)
    mamba_like = st.builds(_mamba_like, leaf, leaf, _NAMES, _NAMES)
    return st.one_of(
        leaf, mamba_like, *_composed(leaf), st.recursive(leaf, _any_composed, max_leaves=6)
    )


def _composed(inner: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Any]]:
    some = st.lists(inner, min_size=1, max_size=4)
    return [
        st.builds(InTurn, some),
        st.builds(Added, some),
        st.builds(SideBySide, some),
        st.builds(BothWays, inner, inner, st.booleans()),
        st.builds(Windowing, inner, st.integers(1, 5), st.integers(0, 1)),
    ]


def _any_composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(*_composed(inner))


def _mamba_like(core: Leafy, skip: Leafy, gate: str | None, before: str | None) -> Tree:
    """What most adapters make: a core and a skip between scalings, behind a convolution."""
    every = (True,) * 4
    return InTurn(
        [
            Scale(every, "mild", gate),
            Added([core, skip]),
            Scale(every, "mild", before),
            Taps((0, 1, 2), (False, False, True, True), "conv"),
        ]
    )


@dataclass(frozen=True)
class Case:
    """An operator to be grown: the same one each time."""

    tree: Any
    shape: Shape
    dtype: torch.dtype
    seed: int

    def grow(self) -> Node:
        torch.manual_seed(self.seed)
        return self.tree.grow(self.shape, self.dtype)  # type: ignore[no-any-return]

    def randn(self, *size: int) -> torch.Tensor:
        """Random numbers in the operator's dtype."""
        return torch.randn(*size, dtype=self.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Operators of all kinds, sizes and lengths."""
    per_head = draw(st.sampled_from([1, 1, 2, 3]))
    tokens = draw(LENGTHS)
    few = tokens > 70  # matrices are many then
    shape = Shape(
        batch=draw(st.integers(1, 1 if few else 3)),
        tokens=tokens,
        heads=draw(st.integers(1, 2 if few else 6)),
        per_head=per_head,
    )
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    return Case(draw(trees(per_head)), shape, dtype, draw(st.integers(0, 2**31 - 1)))
