"""The way of a mixer's output into the residual stream: norms, gates and projections behind it.

What acts within tokens between both is affine once its factors are frozen, as the statistics of a
norm are.  It is read off the functions that are called, and held to what was added to the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..operators.kernels.arithmetic import sum_tensors, unseen
from ..operators.kernels.rows import tokens_at
from ..operators.kernels.truths import holds
from .places.calls import storage_of
from .places.rules import KEPT, REORDERED, RESHAPED
from .places.rules.groups import tensors


class Step(NamedTuple):
    """y = (x * factor) matrix + bias, within tokens.

    Attributes:
        factor: a number, or a tensor that broadcasts to x (B, L, E). Default: 1.0.
        matrix: (E, E'). Default: None, the identity.
        bias: (E'). Default: None, nothing.
    """

    factor: float | Tensor = 1.0
    matrix: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Take a step.

        Args:
            x: (B, L, E).
        """
        out = x * _at(self.factor, x)
        if self.matrix is not None:
            out = out @ self.matrix.to(out)
        return out if self.bias is None else out + self.bias.to(out)

    @property
    def is_of_tokens(self) -> bool:
        """Whether the factor is one for each token (B, L, 1)."""
        factor = self.factor
        return (
            isinstance(factor, Tensor)
            and factor.dim() == 3
            and factor.shape[1] > 1 == factor.shape[2]
        )

    @property
    def is_alike(self) -> bool:
        """Whether the step is the same at every token of every example."""
        return not isinstance(self.factor, Tensor) or self.factor.numel() == self.factor.shape[-1]

    def back(self, direction: Tensor) -> Tensor:
        """The adjoint, without the bias.

        Args:
            direction: (..., B, L, E').
        """
        if self.matrix is not None:
            direction = direction @ self.matrix.to(direction).T
        return direction * _at(self.factor, direction)

    def at(self, index: Tensor) -> Step:
        """The step at some tokens ``index`` (B, q), of vectors (B, q, s, E)."""
        factor = self.factor
        if not isinstance(factor, Tensor) or factor.dim() < 3:
            return self
        if factor.shape[1] > 1:
            factor = tokens_at(factor, index)
        return self._replace(factor=factor[:, :, None])

    def fits(self, x: Tensor) -> bool:
        """Whether the step can be taken from ``x`` (B, L, E)."""
        if isinstance(self.factor, Tensor):
            sizes = zip(self.factor.shape[::-1], x.shape[::-1], strict=False)
            if self.factor.dim() > x.dim() or any(own not in (1, size) for own, size in sizes):
                return False
        return self.matrix is None or len(self.matrix) == x.shape[-1]

    def reordered(self, change: Callable[[Tensor], Tensor]) -> Step:
        """The step with what differs between tokens changed.

        Args:
            change: of tensors (B, L, ...).
        """
        factor = self.factor
        if isinstance(factor, Tensor) and factor.dim() == 3 and factor.shape[1] > 1:
            return self._replace(factor=change(factor))
        return self


#: From what a mixer returned to what is added to the stream.
Way = Sequence[Step]


def along(way: Way, x: Tensor) -> Tensor:
    """What a way leads to from ``x`` (B, L, E)."""
    for step in way:
        x = step(x)
    return x


def _same(x: Tensor, value: Tensor, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a tensor is what its ways lead to, but for rounding.

    Args:
        x: the tensor.
        value: what the ways lead to.
        dtypes: of what is on the way.
    """
    if x.shape != value.shape or not x.numel():
        return False
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    accepted = max(8 * eps, min(128 * eps, 1e-3))
    return holds((x - value.to(x.device)).abs().max() <= accepted * x.abs().max())


def _between(start: Mapping[int, Tensor], end: Mapping[int, Tensor]) -> Callable[[Tensor], Tensor]:
    """Puts what belongs to the tokens of one tensor (B, L, ...) in the order of another one's.

    Args:
        start, end: places of the same mixers' tokens in both, by the number of the mixer.
    """
    number = next(iter(start))
    order = start[number].argsort(1).gather(1, end[number])
    return lambda x: tokens_at(x, order)


def _at(factor: float | Tensor, x: Tensor) -> float | Tensor:
    return factor.to(x) if isinstance(factor, Tensor) else factor


class Terms(NamedTuple):
    """What of a tensor comes from mixers whose way is followed.

    Attributes:
        places: of their tokens in it (B, L), by the number of the mixer.
        weights: with which their outputs are terms of it, by number; 0 for one of which it is
            another function.
    """

    places: Mapping[int, Tensor]
    weights: Mapping[int, float]


class Summand(NamedTuple):
    """A tensor, and the steps from it to a term of a result.

    Attributes:
        start: the tensor.
        terms: what of it comes from mixers.
        steps: the steps.
    """

    start: Tensor
    terms: Terms
    steps: Way


class Found(NamedTuple):
    """How a tensor came about.

    Attributes:
        ways: from the outputs of mixers, by the number of the mixer.
        value: what the ways lead to.
        dtypes: of what is on the way.
    """

    ways: dict[int, Way]
    value: Tensor
    dtypes: frozenset[torch.dtype]

    def of(self, features: slice) -> Found | None:
        """The same of some features; None where it is not known how to leave out the others."""
        if features == slice(None):
            return self
        ways: dict[int, Way] = {}
        for number, (*way, last) in self.ways.items():
            if last.matrix is None:
                return None
            bias = None if last.bias is None else last.bias[features]
            ways[number] = [*way, last._replace(matrix=last.matrix[:, features], bias=bias)]
        return self._replace(ways=ways, value=self.value[..., features])


@dataclass(frozen=True, eq=False)
class _Taken:
    """A result, and how it may have come about: tensors that it is a sum of, steps from each."""

    result: Tensor
    options: Sequence[Sequence[Summand]]


class Ways:
    """Keeps the steps that functions take from what mixers returned.

    Args:
        terms: what of a tensor comes from the mixers whose way is followed; None for nothing.
        output: what a mixer returned, by its number, its tokens at places (B, L).
    """

    def __init__(
        self,
        terms: Callable[[Tensor], Terms | None],
        output: Callable[[int, Tensor], Tensor],
    ) -> None:
        self._terms, self._output = terms, output
        #: How a result may have come about, by its memory.  Results are held, so that no other
        #: takes the place of one.
        self._taken: dict[int, _Taken] = {}
        self._known: dict[_Taken, Found | None] = {}

    def forget(self) -> None:
        """Let go of all steps."""
        self._taken.clear()
        self._known.clear()

    def told(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """Hear of a function before it is called; returns what is to hear of its result."""
        ways: list[list[Summand]] = []
        given = list(tensors((*args, *kwargs.values())))
        with unseen(), torch.no_grad():
            terms_of = {id(x): self._terms(x) for x in given}
            if all(terms is None for terms in terms_of.values()):
                return None
            for options in STEPS[name](name, args, kwargs):
                each = [(x.detach(), terms_of[id(x)], steps) for x, steps in options]
                found = [Summand(x, terms, way) for x, terms, way in each if terms is not None]
                if found and len(found) == len(each):
                    ways.append(found)
        if not ways:
            return None
        before = {storage_of(x) for x in given}

        def keep(result: Any) -> None:
            if isinstance(result, Tensor) and storage_of(result) not in before:
                self._taken[storage_of(result)] = _Taken(result.detach(), ways)

        return keep

    def to(self, x: Tensor, places: Mapping[int, Tensor]) -> dict[int, Way] | None:
        """What was done to mixers' outputs to make a tensor of them, by the mixers' numbers.

        Args:
            x: the tensor (B, L, E).
            places: of the mixers' tokens in it, by the number of the mixer.

        Returns:
            The ways by the tokens of ``x``; None if they are not known, or lead to something else.
        """
        self._known.clear()
        terms = self._terms(x)
        found = None if terms is None else self._back(x.detach(), terms, places)
        if found is None or found.ways.keys() != places.keys() or not _same(x, *found[1:]):
            return None
        return found.ways

    def _back(self, x: Tensor, terms: Terms, places: Mapping[int, Tensor]) -> Found | None:
        if not terms.places.keys() <= places.keys():
            return None
        taken = self._taken.get(storage_of(x))
        features = None if taken is None else _features(x, taken.result)
        if taken is not None and features is not None:
            if taken not in self._known:
                each = (self._sum(taken.result, option, places) for option in taken.options)
                self._known[taken] = next((found for found in each if found is not None), None)
            found = self._known[taken]
            if found is not None:
                return found.of(features)
        if not all(terms.weights.values()):
            return None
        outputs = [w * self._output(n, places[n]) for n, w in terms.weights.items()]
        ways: dict[int, Way] = {n: [Step(w)] for n, w in terms.weights.items()}
        return Found(ways, sum_tensors(outputs), frozenset({x.dtype}))

    def _sum(
        self, x: Tensor, summands: Sequence[Summand], places: Mapping[int, Tensor]
    ) -> Found | None:
        ways: dict[int, Way] = {}
        values, dtypes = [], {x.dtype}
        for start, terms, steps in summands:
            found = self._back(start, terms, places)
            if found is None:
                return None
            change = _between(terms.places, places)
            value, ordered = found.value, [step.reordered(change) for step in steps]
            for step in ordered:
                if not step.fits(value):
                    return None
                value = step(value)
            for number, way in found.ways.items():
                whole: Way | None = [*way, *ordered]
                if number in ways:
                    whole = _added(ways[number], [*way, *ordered])
                if whole is None:
                    return None
                ways[number] = whole
            values.append(value)
            dtypes |= found.dtypes
        if any(value.shape != values[0].shape for value in values):
            return None
        return Found(ways, sum_tensors(values), frozenset(dtypes))


def _features(x: Tensor, whole: Tensor) -> slice | None:
    """Which features of a result a tensor that shares its memory holds; None if it is another."""
    if x.numel() == whole.numel():
        return slice(None)
    first = x.storage_offset() - whole.storage_offset()
    same = x.shape[:-1] == whole.shape[:-1] and x.stride() == whole.stride()
    until = first + x.shape[-1] if same else -1
    return slice(first, until) if 0 <= first < until <= whole.shape[-1] else None


def _added(one: Way, other: Way) -> Way | None:
    """Two ways as one that leads to their sum, if what they do not share is alike at all tokens."""
    pairs = zip(one, other, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
    rests = one[shared:], other[shared:]
    matrices = [step.matrix for rest in rests for step in rest if step.matrix is not None]
    if not matrices or not all(step.is_alike for rest in rests for step in rest):
        return None
    start = torch.eye(len(matrices[0]), dtype=matrices[0].dtype, device=matrices[0].device)
    ends = [start, start]
    constants = [torch.zeros_like(start[0])] * 2
    for i, rest in enumerate(rests):
        for step in rest:
            ends[i], constants[i] = step._replace(bias=None)(ends[i]), step(constants[i])
    return [*one[:shared], Step(matrix=sum_tensors(ends), bias=sum_tensors(constants))]


# --- what functions do ---------------------------------------------------------------------------

#: Ways in which a result may come about: the tensors that it is a sum of, and steps from each.
_Options = list[list[tuple[Tensor, Way]]]
_Arguments = tuple[Any, ...]


def _arguments(names: str, args: _Arguments, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for place, name in enumerate(names.split()):
        yield args[place] if len(args) > place else kwargs.get(name)


def _linear(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    x, weight, bias = _arguments("input weight bias", args, kwargs)
    if type(weight) not in (Tensor, nn.Parameter):  # a quantised one may be no matrix
        return []
    return [[(x, [Step(matrix=weight.detach().T, bias=_detached(bias))])]]


def _layer_norm(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    x, size, weight, bias, eps = _arguments("input normalized_shape weight bias eps", args, kwargs)
    if len(size) != 1:
        return []
    wide = _wide(x)
    centre = torch.eye(size[0], dtype=wide.dtype, device=x.device) - 1 / size[0]
    spread = wide.var(-1, correction=0, keepdim=True).add(1e-5 if eps is None else eps).rsqrt()
    gain = 1.0 if weight is None else weight.detach()
    return [[(x, [Step(matrix=centre), Step(spread), Step(gain, bias=_detached(bias))])]]


def _rms_norm(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    x, size, weight, eps = _arguments("input normalized_shape weight eps", args, kwargs)
    if len(size) != 1:
        return []
    least = torch.finfo(x.dtype).eps if eps is None else eps
    spread = _wide(x).square().mean(-1, keepdim=True).add(least).rsqrt()
    return [[(x, [Step(spread), Step(1.0 if weight is None else weight.detach())])]]


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _product(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    """Either of the factors may be what comes from a mixer, and the other one its gate."""
    one, other = _arguments("input other", args, kwargs)
    pairs = ((one, other), (other, one))
    return [[(x, [Step(_by_example(gate))])] for x, gate in pairs if _is_of_tokens(x)]


def _quotient(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    one, other = _arguments("input other", args, kwargs)
    if kwargs.get("rounding_mode") is not None or not _is_of_tokens(one):
        return []
    return [[(one, [Step(1 / _by_example(other))])]]


def _sum(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    """Of two tensors, or of one and a constant for each feature."""
    one, other = _arguments("input other", args, kwargs)
    sign = kwargs.get("alpha", 1.0) * (-1 if name == "sub" else 1)
    for x, constant, weights in ((one, other, (1.0, sign)), (other, one, (sign, 1.0))):
        if _is_of_tokens(x) and not _is_of_tokens(constant):
            bias = torch.as_tensor(constant, dtype=x.dtype, device=x.device).detach()
            if bias.numel() not in (1, x.shape[-1]):
                return []
            bias = weights[1] * bias.flatten().expand(x.shape[-1])
            return [[(x, [Step(weights[0], bias=bias)])]]
    return [[(one, [Step()]), (other, [Step(sign)])]] if _is_of_tokens(one) else []


def _negative(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    return [[(args[0], [Step(-1.0)])]]


def _matmul(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    one, other = _arguments("input other", args, kwargs)
    if type(other) not in (Tensor, nn.Parameter) or other.dim() != 2:
        return []
    return [[(one, [Step(matrix=other.detach())])]]


def _side_by_side(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    """Features of several tensors: each stands among zeros, and the result is their sum."""
    parts, dim = _arguments("tensors dim", args, kwargs)
    if dim not in (-1, 2) or not all(x.dim() == 3 for x in parts):
        return []
    widths = [x.shape[-1] for x in parts]
    places = torch.eye(sum(widths), dtype=parts[0].dtype, device=parts[0].device)
    each = zip(parts, torch.split(places, widths), strict=True)
    return [[(x, [Step(matrix=place)]) for x, place in each]]


def _is_of_tokens(x: Any) -> bool:
    """Whether an operand is a tensor (B, L, E), and not the same for all tokens of all examples."""
    return isinstance(x, Tensor) and x.dim() == 3 and x.numel() > x.shape[-1]


def _by_example(factor: float | Tensor) -> float | Tensor:
    """A factor whose tokens are the second of three dimensions; one alike for all has one (E,)."""
    if not isinstance(factor, Tensor):
        return factor
    factor = factor.detach()
    if factor.numel() == factor.shape[-1:].numel():
        return factor.flatten()
    return factor[None] if factor.dim() == 2 else factor


def _handed_on(name: str, args: _Arguments, kwargs: dict[str, Any]) -> _Options:
    return [[(args[0], [Step()])]]


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


#: Functions that are affine within tokens, or put these in another order.
STEPS: dict[str, Callable[[str, _Arguments, dict[str, Any]], _Options]] = {
    "linear": _linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "mul": _product,
    "div": _quotient,
    "neg": _negative,
    "matmul": _matmul,
    "cat": _side_by_side,
    **dict.fromkeys(("add", "sub"), _sum),
    **dict.fromkeys(
        (*f"{KEPT} {REORDERED} {RESHAPED}".split(), "index_select", "__getitem__"), _handed_on
    ),
}
