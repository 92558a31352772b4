"""Functions element by element, and along dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from .groups import (
    Call,
    Group,
    Groups,
    Rule,
    TokensMeet,
    aligned,
    alike,
    is_whole,
    settled,
    tensors,
    tidied,
)
from .moves import kept

#: Functions that pool, if they do so over all tokens.
POOLS = frozenset({"sum", "mean", "nansum", "nanmean", "amax", "amin", "max", "min"})


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
    return alike(call, union(call, operands.values()))


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
    return alike(call, groups)


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


def glu(call: Call) -> Sequence[Groups]:
    """The first half along a dimension, and the second one as its gate."""
    (dim,) = _dims(call, 1, (-1,))
    groups: list[Group] = []
    for group in call.groups(call.first):
        settled(group.places, (dim,))  # or both would be of different tokens
        halves = group.places.chunk(2, dim) if group.places.size(dim) > 1 else (group.places,) * 2
        value, gate = (group.through(half) for half in halves)
        groups += value, gate.gating()
    return alike(call, tidied(groups))


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
        return alike(call, tuple(g.through(g.places) for g in groups))
    whole = all(call.results[0].shape[d] == 1 for d in dims)
    raise TokensMeet(pooled=whole and all(is_whole(g, dims, call) for g in groups))


def as_complex(call: Call) -> Sequence[Groups]:
    """Pairs of numbers as one."""
    return [tuple(g.through(settled(g.places, (-1,)).squeeze(-1)) for g in call.groups(call.first))]


def as_real(call: Call) -> Sequence[Groups]:
    return [tuple(g.through(g.places.unsqueeze(-1)) for g in call.groups(call.first))]
