"""Slow, generic versions of an operator's methods, derived from its map and its adjoint.

:class:`~captum_ssm.operators.Operator` documents these methods, and uses them where a subclass has
no faster version.  They accept any operator, so tests compare the fast versions with them, in
float64.  Shapes are as in :mod:`.base`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import GradientModeError, OptionError
from .kernels.arithmetic import sum_tensors
from .kernels.bands import Band
from .kernels.rows import Positions, Strip, at_positions, in_stacks, per_example, unit_vectors
from .reduction import Reduce, goes_by_channel, matrices_by_channel, mean_by_head, reduce_channels

if TYPE_CHECKING:
    from .base import Operator, Pull


def transpose(operator: Operator, u: Tensor) -> Tensor:
    """Apply the adjoint of ``operator.apply`` to ``u``, by automatic differentiation."""
    with torch.inference_mode(False), torch.enable_grad():
        v = torch.zeros_like(u, requires_grad=True)  # any v: the derivative of a linear map
        out = operator.apply(v)
        if not out.requires_grad:  # every token is mapped to zero
            if operator.apply(u).any():
                raise GradientModeError(
                    f"{type(operator).__name__}.apply detaches its result from its values, so "
                    "neither gradients nor relevance can be computed. Remove detach, no_grad and "
                    ".data there, or define the operator's transpose method."
                )
            return torch.zeros_like(u)
        # a copy, because autograd cannot save a tensor that was made in inference mode
        (gradient,) = torch.autograd.grad(out, v, u.clone())
    return gradient


def vjp(
    operator: Operator, values: Tensor, coefficients: Mapping[str, Tensor]
) -> tuple[Tensor, Pull]:
    """Compute :meth:`.Operator.vjp` for each vector of the stack separately."""
    operators = [operator] * len(values)
    if coefficients:
        stack = range(len(values))
        operators = [operator.at({name: x[i] for name, x in coefficients.items()}) for i in stack]

    def pull(gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of the values, and of coefficients, summed over the stack."""
        calls = zip(operators, values, gradient, strict=True)
        of_values, gradients = zip(*(op.backward(v, g) for op, v, g in calls), strict=True)
        sums = {name: sum_tensors(x[name] for x in gradients) for name in gradients[0]}
        return torch.stack(of_values), sums

    return torch.stack([op.apply(v) for op, v in zip(operators, values, strict=True)]), pull


# --- rows: the adjoint of unit vectors ---------------------------------------------------------


def unit_rows(operator: Operator, positions: Positions, weight: Tensor | None = None) -> Tensor:
    """Return rows (Q, B, L, H, P) of every channel's matrix at Q positions, (Q,) or (Q, B)."""
    unit = unit_vectors(positions, operator.shape.tokens, operator._any_coefficient())
    unit = unit.expand(len(positions), *operator.shape)
    return operator.transpose(unit if weight is None else unit * weight)


def rows(operator: Operator, positions: Positions, reduce: Reduce = "mean") -> Tensor:
    """Return rows of the matrices, reduced over channels: (B, Q, L), or (B, C or H, Q, L)."""
    batch, tokens, *_ = operator.shape
    index = per_example(positions, batch, tokens, operator.device)  # (B, Q)
    queries, out = index.shape[1], None
    for indices in _in_stacks(operator, range(queries)):
        stack = operator.unit_rows(index[:, indices.start : indices.stop].T)
        reduced = reduce_channels(stack, reduce)  # (Q, B, [C or H,] L)
        if out is None:  # its sizes are known only now
            out = reduced.new_empty(queries, *reduced.shape[1:])
        out[indices.start : indices.stop] = reduced
    assert out is not None
    return out.movedim(0, -2)


def entries(
    operator: Operator, left: Tensor, band: Band, rows: range, by_head: bool = False
) -> Strip:
    """Return rows of the sum over channels of left[i, c] (alpha_c band_c)[i, j]."""
    batch, tokens, heads, _ = operator.shape
    size = (batch, heads) if by_head else (batch,)
    out = Strip(operator._zeros(*size, len(rows), tokens, factor=left), rows, range(tokens))
    for positions in _in_stacks(operator, rows):
        stack = operator.unit_rows(positions, at_positions(left, positions))  # (Q, B, L, H, P)
        for lag, factor in band.items():
            sums = (stack * factor).sum(-1).permute(1, 3, 0, 2)  # (B, H, Q, L)
            term = Strip(sums if by_head else sums.sum(1), positions, range(tokens))
            out.add(term.moved(0, -lag, tokens))
    return out


# --- whole matrices ----------------------------------------------------------------------------


def dense(
    operator: Operator, reduce: Reduce = "mean", heads: Sequence[int] | None = None
) -> Tensor:
    """Return the matrices, reduced over channels: (B, L, L), or (B, C or H, L, L)."""
    if heads is not None:
        count = operator.shape.heads
        if not len(heads) or not all(-count <= head < count for head in heads):
            remedy = f"got {list(heads)}. Pass one or more such heads, or None for all heads."
            raise OptionError(f"heads must lie in [{-count}, {count}), {remedy}")
        return operator.select([head % count for head in heads]).dense(reduce)
    _, tokens, count, per_head = operator.shape
    one = operator._ones(1, 1, 1, 1)
    if reduce == "mean":
        mean = one / (count * per_head)
        return operator.entries(mean, {0: one}, range(tokens)).full(tokens)
    if reduce == "heads":
        return mean_by_head(operator)
    if goes_by_channel(operator, reduce):
        return matrices_by_channel(operator, reduce)
    return operator.rows(range(tokens), reduce)


def _in_stacks(operator: Operator, rows: range) -> Iterator[range]:
    """Yield ranges of ``rows`` that are small enough for one unit vector per row in memory."""
    return in_stacks(rows, torch.Size(operator.shape).numel(), operator.device)
