"""Recognize multiples, sums, projections and norms of tensors by comparing values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .way import AffineStep, Way, along

#: Number of tokens that are compared to find likely relations of tensors.
_SAMPLE = 16
#: Exceptions that a module may raise for an input of the wrong kind.
_OF_INPUTS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class Branch(NamedTuple):
    """A tensor after a mixer: the affine steps to the tensor, and the tensor's change by noise."""

    steps: Way
    change: Tensor


def rounding_of(x: Tensor, times: int = 1) -> Tensor:
    """Return the largest difference from ``x`` that counts as rounding.

    In float64 the limit of float32 is used, since such models compute parts in float32. ``times``
    raises the limit, for norms and products, except in half precision.
    """
    units = 64 * times if x.dtype.itemsize > 2 else 4
    return units * _eps(x) * x.abs().max()


def _eps(x: Tensor) -> float:
    return max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)


def fit(branches: Sequence[Branch], change: Tensor, x: Tensor) -> Way | None:
    """Return the affine steps to ``x`` if its change is a multiple of a branch's change, else None.

    Args:
        branches: the tensors computed from a mixer's output, latest last.
        change: the change of ``x`` at the tokens with noise.
        x: the tensor. The factor may be a scalar, or one scalar per feature.
    """
    if not change.numel():
        return None
    limit = torch.maximum(rounding_of(x), rounding_of(change)) / (4 if x.dtype.itemsize > 2 else 1)
    if not bool(change.abs().max() > 8 * limit):
        return None
    for steps, of_branch in reversed(branches):
        if of_branch.shape != change.shape:
            continue
        of_branch = of_branch.to(change)
        scale = (of_branch * change).sum() / of_branch.square().sum()
        scale = torch.where((scale - 1).abs() <= max(1e-5, _eps(x)), 1, scale)
        gain = (of_branch * change).sum(0) / of_branch.square().sum(0)
        off = [(change - factor * of_branch).abs().max() for factor in (scale, gain)]
        number, by_number, by_feature, limited = torch.stack([scale, *off, limit]).tolist()
        if by_number <= limited:
            return [*steps, *([] if number == 1 else [AffineStep(number)])]
        if len(of_branch) > 1 and by_feature <= limited:
            return [*steps, AffineStep(gain)]
    return _sum_of(branches, change, limit)


def _sum_of(branches: Sequence[Branch], change: Tensor, limit: Tensor) -> Way | None:
    """Find a weighted sum of branches with this change, such as projection plus LoRA; else None."""
    some = [branch for branch in branches if branch.change.shape == change.shape]
    if len(some) < 2:
        return None
    changes = torch.stack([branch.change.flatten() for branch in some], 1).to(change).double()
    flat = change.flatten()[:, None].double()
    weights = torch.linalg.lstsq(changes, flat).solution
    if not bool((changes @ weights - flat).abs().max() <= limit):
        return None
    return summed([branch.steps for branch in some], weights.flatten().tolist())


def summed(ways: Sequence[Way], weights: Sequence[float]) -> Way | None:
    """Return steps equal to a weighted sum of ``ways``; None if a step differs between tokens."""
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
    """Return the change of a tensor at tokens ``at``, in float32 or wider."""
    exact = torch.promote_types(before.dtype, torch.float32)
    return rows_at(now, at).to(exact) - rows_at(before, at).to(exact)


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """Return the tokens of ``x`` (B, L, ...) at ``at``, which are indices from 0 to B * L - 1."""
    return x.flatten(0, 1).index_select(0, at.to(x.device))


def is_same(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have the same shape and differ only by rounding."""
    return x.shape == y.shape and bool((x - y.to(x)).abs().max() <= rounding_of(x))


def likely(
    rest: Tensor, before: Sequence[Tensor], left: Sequence[Tensor]
) -> list[tuple[str, Tensor, Tensor]]:
    """Find likely relations of a tensor to others, from a few tokens and one synchronization.

    Args:
        rest: the tensor (B, L, E).
        before, left: lists of other tensors with the same shape.

    Returns:
        The kind and two tensors of each relation. ``"scaled"``: a scalar times one of ``before``.
        ``"shifted"``: one of ``before`` plus a constant. ``"sum"``: the sum of two of ``before``.
        ``"part"``: the sum of one of ``before`` and one of ``left``.
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
    """Return True if ``rest`` is equal at all tokens, up to the rounding errors of ``x``."""
    first = rest[:1, :1] if rest.shape[:2].numel() > 1 else 0
    return bool((rest - first).abs().max() <= rounding_of(x))


def steps_of(module: nn.Module, x: Tensor, out: Tensor) -> Way | None:
    """Return steps from ``x`` (B, L, E) to ``out`` if the module is affine or a norm; else None."""
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
    """Return the factors that fit ``x`` to ``y * factors`` by least squares along ``dim``."""
    return (x * y).sum(dim, keepdim=True) / y.square().sum(dim, keepdim=True).clamp_min(1e-300)


def norm_of(x: Tensor, out: Tensor, bias: Tensor | None) -> Way | None:
    """Return steps from ``x`` (B, L, E) to ``out`` if ``out`` is a norm of ``x``; else None."""
    if x.shape[:2].numel() < 2 or not out.any():  # one token, or zeros, are a norm of anything
        return None
    shift = 0.0 if bias is None else bias
    for is_centered in (False, True):
        inner = x - x.mean(-1, keepdim=True) if is_centered else x
        c, d = inner.double().flatten(0, 1), (out - shift).double().flatten(0, 1)
        most = c.abs().amin(-1).argmax()  # the token whose smallest feature is the largest
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
