"""Operators as functions of their coefficients: the coefficients' roles and gradients.

An operator is linear in its values, and its coefficients are frozen.  In the network the
coefficients depend on the input, and each has a role: query, key, step (how far the state decays),
or gate.  The values that are mixed have the role content.  A coefficient is *live* if it was passed
with its autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce

import torch
from torch import Tensor

from .base import Operator, Pull, Role
from .chain import Chain
from .combine import Composite, DirectSum, Sum
from .kernels.arithmetic import sum_tensors
from .reorder import Permute, Windowed

ROLES: tuple[Role, ...] = ("content", "key", "query", "gate", "step")

#: New coefficients, or gradients of coefficients, by operator and coefficient name.
Moved = Mapping[Operator, Mapping[str, Tensor]]
Gradients = dict[Operator, dict[str, Tensor]]
#: The pullback that :func:`vjp` returns; it adds coefficients' gradients to the second argument.
Back = Callable[[Tensor, Gradients], Tensor]


def live_coefficients(operator: Operator) -> dict[tuple[Operator, str], Tensor]:
    """Return coefficients that were passed with their graph, by (operator, coefficient name).

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Chain, Diagonal, Shape
        >>> from captum_ssm.operators.coefficients import live_coefficients
        >>> shape = Shape(batch=1, tokens=3, heads=1, per_head=1)
        >>> gate = Diagonal(torch.ones(1, 3, 1, 1, requires_grad=True), shape, "gate")
        >>> skip = Diagonal(torch.ones(1, 1, 1, 1), shape, "skip")
        >>> [name for _, name in live_coefficients(Chain(gate, skip))]
        ['weight']
    """
    return {(holder, name): x for holder in _holders(operator) for name, x in holder.live.items()}


def _holders(operator: Operator) -> Iterator[Operator]:
    """Yield the operators with coefficients in ``operator``: leaves, and composites like WKV."""
    if isinstance(operator, Composite) and not operator.roles:
        for part in operator.parts:
            yield from _holders(part)
    elif isinstance(operator, Windowed):
        yield from _holders(operator.within)
    else:
        yield operator


def follow_mask(
    operator: Operator, mask: Tensor | None, found: dict[Operator, Tensor | None]
) -> Tensor | None:
    """Return the mask of real tokens (B, L) at the operator's output; None if all are real.

    Args:
        operator: an operator, which may nest chains and sums.
        mask: mask of real tokens at the operator's input (B, L); None if all are real.
        found: this dictionary receives the mask at the input of every operator inside.
    """
    found[operator] = mask
    if isinstance(operator, Chain):
        for part in operator.parts[::-1]:
            mask = follow_mask(part, mask, found)
        return mask
    if isinstance(operator, Sum | DirectSum):
        outgoing = mask
        for part in operator.parts:  # each returns the tokens in the same order
            outgoing = follow_mask(part, mask, found)
        return outgoing
    if isinstance(operator, Windowed):
        follow_mask(operator.within, operator.windows.mask(mask, operator.shape.batch), found)
        return mask
    if isinstance(operator, Permute) and mask is not None:
        return mask.index_select(1, operator.order)
    return mask


def vjp(operator: Operator, values: Tensor, moved: Moved, offset: Tensor) -> tuple[Tensor, Back]:
    """Map S stacked values; return the output and its pullback (vector-Jacobian product).

    Args:
        operator: an operator, which may nest chains and sums.
        values: stacked inputs (S, B, L, H, P).
        moved: new coefficients (S, B, ...) of operators inside, by operator and coefficient name.
        offset: factors (S, 1, 1, 1, 1) of the constants that biases inside the operator add.

    Returns:
        The output (S, B, L, H, P), and a function of its gradient. The function returns the values'
        gradient, and adds live coefficients' gradients, summed over the stack, to its second
        argument.
    """
    if operator.live:
        out, back = operator.vjp(values, moved.get(operator, {}))
        return _with_constant(operator, out, offset), partial(_pulled, operator, back)
    if isinstance(operator, Chain):
        backs = []
        for part in operator.parts[::-1]:
            values, one = vjp(part, values, moved, offset)
            backs.append(one)
        return values, lambda gradient, found: reduce(
            lambda g, f: f(g, found), backs[::-1], gradient
        )
    if isinstance(operator, Sum):
        outs, each = zip(*(vjp(p, values, moved, offset) for p in operator.parts), strict=True)
        return sum_tensors(outs), lambda gradient, found: sum_tensors(
            f(gradient, found) for f in each
        )
    if isinstance(operator, DirectSum):
        heads = [part.shape.heads for part in operator.parts]
        shares = zip(operator.parts, torch.split(values, heads, -2), strict=True)
        outs, each = zip(*(vjp(p, v, moved, offset) for p, v in shares), strict=True)

        def side_by_side(gradient: Tensor, found: Gradients) -> Tensor:
            cut = torch.split(gradient, heads, -2)
            return torch.cat([f(g, found) for f, g in zip(each, cut, strict=True)], -2)

        return torch.cat(outs, -2), side_by_side
    if isinstance(operator, Windowed):
        windows, cut = operator.windows, operator.entering(values, offset)
        out, back_within = vjp(operator.within, cut, moved, offset)
        return windows.merge(out), lambda gradient, found: windows.merge(
            back_within(windows.cut(gradient), found)
        )
    out = _with_constant(operator, operator.apply(values), offset)
    return out, lambda gradient, _: operator.transpose(gradient)


def _pulled(operator: Operator, back: Pull, gradient: Tensor, found: Gradients) -> Tensor:
    """Return the values' gradient from ``back``; add coefficients' gradients to ``found``."""
    of_values, of_coefficients = back(gradient)
    total = found.setdefault(operator, {})
    for name, x in of_coefficients.items():
        total[name] = total[name] + x if name in total else x
    return of_values


def _with_constant(operator: Operator, out: Tensor, factor: Tensor) -> Tensor:
    constant = operator.offset()
    return out if constant is None else out + factor * constant
