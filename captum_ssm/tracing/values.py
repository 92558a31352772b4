"""Whether tensors of a run are multiples, sums, projections or norms of each other, by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .way import AffineStep, Way, along

#: So many tokens tell which tensors may be alike.
_SAMPLE = 16
#: What modules raise at inputs that they do not take.
_OF_INPUTS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class Branch(NamedTuple):
    """A tensor between a mixer and the stream: the steps to it, and its change by the noise."""

    steps: Way
    change: Tensor


def rounding_of(x: Tensor, times: int = 1) -> Tensor:
    """The largest difference that is rounding; models in float64 have parts in float32.

    Args:
        x: the tensor.
        times: so many times more is rounding in norms and products, but of half numbers.
    """
    units = 64 * times if x.dtype.itemsize > 2 else 4
    return units * _eps(x) * x.abs().max()


def _eps(x: Tensor) -> float:
    return max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)


def fit(branches: Sequence[Branch], change: Tensor, x: Tensor) -> Way | None:
    """Steps to a tensor that changes by a number, or one per feature, times a branch's change.

    Args:
        branches: what an output became, the latest last.
        change: of the tensor, at the tokens with noise.
        x: the tensor.
    """
    if not change.numel():
        return None
    limit = torch.maximum(rounding_of(x), rounding_of(change)) / (4 if x.dtype.itemsize > 2 else 1)
    if not bool(change.abs().max() > 8 * limit):
        return None
    for steps, own in reversed(branches):
        if own.shape != change.shape:
            continue
        own = own.to(change)
        scale = (own * change).sum() / own.square().sum()
        scale = torch.where((scale - 1).abs() <= max(1e-5, _eps(x)), 1, scale)
        gain = (own * change).sum(0) / own.square().sum(0)
        off = [(change - factor * own).abs().max() for factor in (scale, gain)]
        number, by_number, by_feature, limited = torch.stack([scale, *off, limit]).tolist()
        if by_number <= limited:
            return [*steps, *([] if number == 1 else [AffineStep(number)])]
        if len(own) > 1 and by_feature <= limited:
            return [*steps, AffineStep(gain)]
    return _sum_of(branches, change, limit)


def _sum_of(branches: Sequence[Branch], change: Tensor, limit: Tensor) -> Way | None:
    """The step to a sum of branches that are linear, such as a projection and its adapter."""
    some = [branch for branch in branches if branch.change.shape == change.shape]
    if len(some) < 2:
        return None
    owns = torch.stack([branch.change.flatten() for branch in some], 1).to(change).double()
    flat = change.flatten()[:, None].double()
    weights = torch.linalg.lstsq(owns, flat).solution
    if not bool((owns @ weights - flat).abs().max() <= limit):
        return None
    return summed([branch.steps for branch in some], weights.flatten().tolist())


def summed(ways: Sequence[Way], weights: Sequence[float]) -> Way | None:
    """A weighted sum of ways that are linear behind the steps that all of them begin with."""
    shared = 0
    while all(len(way) > shared and way[shared] is ways[0][shared] for way in ways):
        shared += 1
    rests = [way[shared:] for way in ways]
    if not all(step.is_alike for rest in rests for step in rest):
        return None
    found = [step.matrix for rest in rests for step in rest if step.matrix is not None]
    if not found:
        return None
    eye = torch.eye(len(found[0]), dtype=found[0].dtype, device=found[0].device)
    bias = sum(
        w * along(rest, torch.zeros_like(eye[:1])) for w, rest in zip(weights, rests, strict=True)
    )
    matrix = sum(w * along(rest, eye) for w, rest in zip(weights, rests, strict=True))
    assert isinstance(matrix, Tensor) and isinstance(bias, Tensor)
    return [*ways[0][:shared], AffineStep(matrix=matrix - bias, bias=bias[0])]


def change_at(now: Tensor, before: Tensor, at: Tensor) -> Tensor:
    """The change of a tensor at some places of tokens, as exact as half numbers allow."""
    exact = torch.promote_types(before.dtype, torch.float32)
    return rows_at(now, at).to(exact) - rows_at(before, at).to(exact)


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """The tokens at some places.

    Args:
        x: (B, L, ...).
        at: the places among all B * L.
    """
    return x.flatten(0, 1).index_select(0, at.to(x.device))


def is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal but for rounding.

    Args:
        x, y: the tensors.
    """
    return x.shape == y.shape and bool((x - y.to(x)).abs().max() <= rounding_of(x))


def likely(
    rest: Tensor, before: Sequence[Tensor], left: Sequence[Tensor]
) -> list[tuple[str, Tensor, Tensor]]:
    """How some tokens of a tensor may come from others; a device is asked once for all of them.

    Args:
        rest: the tensor (B, L, E).
        before, left: others of its shape.

    Returns:
        Of each likeness its kind, a tensor before, and the other: ``"scaled"``, one before times a
        number; ``"shifted"``, one and a constant; ``"sum"``, two of them; ``"part"``, one and one
        that was left.
    """
    if not before:
        return []
    step = max(1, rest.shape[:2].numel() // _SAMPLE)

    def some(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[::step][:_SAMPLE]

    mine, these = some(rest), torch.stack([*map(some, before)])
    those = torch.stack([*map(some, [*before, *left])]).to(mine)
    scale = (these * mine).sum((1, 2), keepdim=True) / these.square().sum((1, 2), keepdim=True)
    gaps = mine - these
    limit = 4 * torch.stack([*map(rounding_of, [rest, *before, *left])]).max()
    near = (mine - scale * these).abs().amax((1, 2)).fmin(gaps.abs().amax((1, 2)))
    shifted = (gaps - gaps[:, :1]).abs().amax((1, 2))
    apart = torch.stack([(gap - those).abs().amax((1, 2)) for gap in gaps])
    table = torch.cat([near[:, None], shifted[:, None], apart], 1) <= limit
    found = list[tuple[str, Tensor, Tensor]]()
    for x, (is_scaled, is_shifted, *sums) in zip(before, table.tolist(), strict=True):
        found += [("scaled", x, x)] * is_scaled + [("shifted", x, x)] * is_shifted
        pairs = zip([*before, *left], sums, strict=True)
        found += [
            ("sum" if i < len(before) else "part", x, other)
            for i, (other, fits) in enumerate(pairs)
            if fits
        ]
    order = ["scaled", "shifted", "sum", "part"]
    return sorted(found, key=lambda each: order.index(each[0]))


def is_constant(rest: Tensor, x: Tensor) -> bool:
    """Whether nothing but a constant is left of a tensor."""
    first = rest[:1, :1] if rest.shape[:2].numel() > 1 else 0
    return bool((rest - first).abs().max() <= rounding_of(x))


def steps_of(module: nn.Module, x: Tensor, out: Tensor) -> Way | None:
    """What a module did (B, L, E) as an affine map, or as a norm with frozen statistics."""
    width = x.shape[-1]
    try:
        bias = module(torch.zeros_like(x[:1, :1]))
        eye = torch.eye(width, dtype=x.dtype, device=x.device)
        matrix = (module(eye[None]) - bias)[0]
    except _OF_INPUTS:  # it takes something else
        return None
    bias = bias[0, 0]
    if matrix.dim() == 2 and bool((x @ matrix + bias - out).abs().max() <= rounding_of(out, 16)):
        return [AffineStep(matrix=matrix, bias=bias)]
    return norm_of(x, out, bias) if out.shape == x.shape else None


def _quotient(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """The factors by which ``y`` is closest to ``x`` along a dimension."""
    return (x * y).sum(dim, keepdim=True) / y.square().sum(dim, keepdim=True).clamp_min(1e-300)


def norm_of(x: Tensor, out: Tensor, bias: Tensor | None) -> Way | None:
    """Steps from ``x`` (B, L, E) to a norm of it, its statistics frozen; None if it is none."""
    if x.shape[:2].numel() < 2 or not out.any():  # one token, or zeros, are a norm of anything
        return None
    shift = 0.0 if bias is None else bias
    for is_centered in (False, True):
        inner = x - x.mean(-1, keepdim=True) if is_centered else x
        c, d = inner.double().flatten(0, 1), (out - shift).double().flatten(0, 1)
        most = c.abs().amin(-1).argmax()  # the token that tells the gain of every feature
        gain = d[most] / c[most].where(c[most] != 0, 1)
        for _ in range(3):  # of rank one: the statistics' size times the gain
            size = _quotient(d, c * gain, -1)
            gain = _quotient(d, c * size, 0)
        size = size.view(*x.shape[:2], 1)
        gain, size = gain.to(x), size.to(x)
        if bool((inner * gain * size + shift - out).abs().max() <= rounding_of(out, 16)):
            eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
            first = [AffineStep(matrix=eye - 1 / x.shape[-1])] if is_centered else []
            return [*first, AffineStep(size), AffineStep(gain, bias=bias)]
    return None
