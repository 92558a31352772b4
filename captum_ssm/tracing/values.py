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
#: Units in the last place of a tensor's largest value that count as rounding: in float32, whose
#: sums round many times, and in half precision, whose sums kernels round only at the end.
_UNITS, _UNITS_OF_HALF = 64, 4


class Branch(NamedTuple):
    """A tensor after a mixer: the affine steps to the tensor, and the tensor's change by noise."""

    steps: Way
    change: Tensor


def rounding_of(x: Tensor, times: int = 1) -> Tensor:
    """Return the largest difference from ``x`` that counts as rounding.

    In float64 the limit of float32 is used, since such models compute parts in float32. ``times``
    raises the limit, for norms and products, but not in half precision, where it is large anyway.
    """
    units = _UNITS * times if x.dtype.itemsize > 2 else _UNITS_OF_HALF
    return units * _eps(x) * x.abs().max()


def _eps(x: Tensor) -> float:
    """Return the spacing of numbers at 1 in the dtype of ``x``, in float32 at the finest."""
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
    if not bool(change.abs().max() > 8 * limit):  # rounding, which fits anything
        return None
    for steps, branch_change in reversed(branches):
        if branch_change.shape != change.shape:
            continue
        branch_change = branch_change.to(change)
        scale = (branch_change * change).sum() / branch_change.square().sum()
        scale = torch.where((scale - 1).abs() <= max(1e-5, _eps(x)), 1, scale)  # 1 despite rounding
        gain = (branch_change * change).sum(0) / branch_change.square().sum(0)
        errors = [(change - factor * branch_change).abs().max() for factor in (scale, gain)]
        numbers = torch.stack([scale, *errors, limit]).tolist()  # one wait for a GPU
        scalar, error_of_scale, error_of_gain, accepted = numbers
        if error_of_scale <= accepted:
            return [*steps, *([] if scalar == 1 else [AffineStep(scalar)])]
        if len(branch_change) > 1 and error_of_gain <= accepted:  # one token fits any gain
            return [*steps, AffineStep(gain)]
    return _sum_of(branches, change, limit)


def _sum_of(branches: Sequence[Branch], change: Tensor, limit: Tensor) -> Way | None:
    """Find a weighted sum of branches with this change, such as projection plus LoRA; else None."""
    candidates = [branch for branch in branches if branch.change.shape == change.shape]
    if len(candidates) < 2:
        return None
    changes = torch.stack([branch.change.flatten() for branch in candidates], 1).to(change).double()
    flat = change.flatten()[:, None].double()
    weights = torch.linalg.lstsq(changes, flat).solution  # changes @ weights = flat
    if not bool((changes @ weights - flat).abs().max() <= limit):
        return None
    return weighted_sum([branch.steps for branch in candidates], weights.flatten().tolist())


def weighted_sum(ways: Sequence[Way], weights: Sequence[float]) -> Way | None:
    """Return steps equal to a weighted sum of ``ways``; None if a step differs between tokens.

    First the steps that all ways share, then one step: what the others do to unit vectors and 0.
    """
    shared = 0  # the number of first steps that all ways have in common
    while all(len(way) > shared and way[shared] is ways[0][shared] for way in ways):
        shared += 1
    rests = [way[shared:] for way in ways]
    if not all(step.is_alike for rest in rests for step in rest):
        return None
    matrices = [step.matrix for rest in rests for step in rest if step.matrix is not None]
    if not matrices:  # nothing shows the number of features
        return None
    eye = torch.eye(len(matrices[0]), dtype=matrices[0].dtype, device=matrices[0].device)
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


def likely_relations(
    rest: Tensor, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[tuple[str, Tensor, Tensor]]:
    """Find likely relations of a tensor to others, from a few tokens and one synchronization.

    Args:
        rest: the tensor (B, L, E).
        inputs, outputs: lists of other tensors with the same shape.

    Returns:
        The kind and two tensors of each relation. ``"scaled"``: a scalar times one of ``inputs``.
        ``"shifted"``: one of ``inputs`` plus a constant. ``"sum"``: the sum of two of ``inputs``.
        ``"part"``: the sum of one of ``inputs`` and one of ``outputs``.
    """
    if not inputs:
        return []
    step = max(1, rest.shape[:2].numel() // _SAMPLE)

    def sample(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[::step][:_SAMPLE]

    # x (S, E); xs and gaps, one entry for each input: (I, S, E); all_xs (I + O, S, E)
    x, xs = sample(rest), torch.stack([*map(sample, inputs)])
    all_xs = torch.stack([*map(sample, [*inputs, *outputs])]).to(x)
    scale = (xs * x).sum((1, 2), keepdim=True) / xs.square().sum((1, 2), keepdim=True)
    gaps = x - xs
    # generous, as relations are only likely
    limit = 4 * torch.stack([*map(rounding_of, [rest, *inputs, *outputs])]).max()
    scaled_error = (x - scale * xs).abs().amax((1, 2)).fmin(gaps.abs().amax((1, 2)))
    shifted_error = (gaps - gaps[:, :1]).abs().amax((1, 2))
    sum_errors = torch.stack([(gap - all_xs).abs().amax((1, 2)) for gap in gaps])
    fits = torch.cat([scaled_error[:, None], shifted_error[:, None], sum_errors], 1) <= limit
    relations = list[tuple[str, Tensor, Tensor]]()
    for a, (is_scaled, is_shifted, *are_sums) in zip(inputs, fits.tolist(), strict=True):
        relations += [("scaled", a, a)] * is_scaled + [("shifted", a, a)] * is_shifted
        for i, (b, is_sum) in enumerate(zip([*inputs, *outputs], are_sums, strict=True)):
            if is_sum:
                relations.append(("sum" if i < len(inputs) else "part", a, b))
    order = ["scaled", "shifted", "sum", "part"]  # the simplest first
    return sorted(relations, key=lambda relation: order.index(relation[0]))


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
        matrix = (module(eye[None]) - bias)[0]  # (E, E'), from each unit vector as a token
    except _OF_INPUTS:  # the module takes no such sequence
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
    for is_centered in (False, True):  # RMS norm, then layer norm
        inner = x - x.mean(-1, keepdim=True) if is_centered else x
        a, b = inner.double().flatten(0, 1), (out - shift).double().flatten(0, 1)
        # b = a * size * gain, with one size for each token and one gain for each feature
        token = a.abs().amin(-1).argmax()  # whose features are farthest from 0, to divide by
        gain = b[token] / a[token].where(a[token] != 0, 1)
        for _ in range(3):  # alternating least squares
            size = _quotient(b, a * gain, -1)
            gain = _quotient(b, a * size, 0)
        size = size.view(*x.shape[:2], 1)
        gain, size = gain.to(x), size.to(x)
        if bool((inner * gain * size + shift - out).abs().max() <= rounding_of(out, 16)):
            eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
            centering = [AffineStep(matrix=eye - 1 / x.shape[-1])] if is_centered else []
            return [*centering, AffineStep(size), AffineStep(gain, bias=bias)]
    return None
