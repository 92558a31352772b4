"""Operators as functions of their coefficients: what those do, and how the outputs follow them.

An operator is linear in its values, and its coefficients are frozen.  In the network they follow
from the input, each in a role: what a token asks for (query), what it is matched by (key), how far
a state moves on at it (step), how much of it is let through (gate).  Beside these stands what is
moved, the values (content).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce

import torch
from torch import Tensor

from ..base import Operator, Pull, Role
from ..chain import Chain
from ..combine import Composite, DirectSum, Sum
from ..kernels.arithmetic import sum_tensors
from ..reorder import Permute, Windowed

ROLES: tuple[Role, ...] = ("content", "key", "query", "gate", "step")

#: Coefficients of parts, or their gradients, by name.
Moved = Mapping[Operator, Mapping[str, Tensor]]
Gradients = dict[Operator, dict[str, Tensor]]
#: From the gradient of outputs to that of values; gradients of coefficients are added to the second
#: argument.
Back = Callable[[Tensor, Gradients], Tensor]


def live_coefficients(operator: Operator) -> dict[tuple[Operator, str], Tensor]:
    """The coefficients that came with their graph, by who holds them and the name there.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Chain, Diagonal, Shape
        >>> from captum_ssm.operators.readings.coefficients import live_coefficients
        >>> shape = Shape(batch=1, tokens=3, heads=1, per_head=1)
        >>> gate = Diagonal(torch.ones(1, 3, 1, 1, requires_grad=True), shape, "gate")
        >>> skip = Diagonal(torch.ones(1, 1, 1, 1), shape, "skip")
        >>> [name for _, name in live_coefficients(Chain(gate, skip))]
        ['weight']
    """
    return {(holder, name): x for holder in _holders(operator) for name, x in holder.live.items()}


def _holders(operator: Operator) -> Iterator[Operator]:
    """The parts that hold coefficients of their own: leaves, and sums that are more than that."""
    if isinstance(operator, Composite) and not operator.roles:
        for part in operator.parts:
            yield from _holders(part)
    elif isinstance(operator, Windowed):
        yield from _holders(operator.inner)
    else:
        yield operator


def follow_mask(
    operator: Operator, mask: Tensor | None, found: dict[Operator, Tensor | None]
) -> Tensor | None:
    """Which tokens are real, in the order in which the operator returns them.

    Args:
        operator: chains and sums of any depth.
        mask: True for real tokens (B, L) in the order in which it is given them; None if all are.
        found: takes up the masks of parts.
    """
    found[operator] = mask
    if isinstance(operator, Chain):
        for part in operator.parts[::-1]:
            mask = follow_mask(part, mask, found)
        return mask
    if isinstance(operator, Sum | DirectSum):
        after = mask
        for part in operator.parts:  # each returns the tokens in the same order
            after = follow_mask(part, mask, found)
        return after
    if isinstance(operator, Windowed):
        follow_mask(operator.inner, operator.windows.mask(mask, operator.shape.batch), found)
        return mask
    if isinstance(operator, Permute) and mask is not None:
        return mask.index_select(1, operator.order)
    return mask


def vjp(operator: Operator, values: Tensor, moved: Moved, offset: Tensor) -> tuple[Tensor, Back]:
    """What becomes of a stack of values, and how the gradient of that goes back.

    Args:
        operator: chains and sums of any depth.
        values: what it acts on, (S, B, L, H, P).
        moved: coefficients (S, B, ...) of parts in place of their own ones, for each of the stack.
        offset: factors (S, 1, 1, 1, 1) on the constants that operators add inside.

    Returns:
        What becomes of the values, and a function: given its gradient, it returns that of the
        values, and adds to its second argument those of live coefficients, summed over the stack.
    """
    if operator.live:
        out, back = operator.vjp(values, moved.get(operator, {}))
        return _with_constant(operator, out, offset), partial(_noted, operator, back)
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
        out, inside = vjp(operator.inner, cut, moved, offset)
        return windows.merge(out), lambda gradient, found: windows.merge(
            inside(windows.cut(gradient), found)
        )
    out = _with_constant(operator, operator.apply(values), offset)
    return out, lambda gradient, _: operator.transpose(gradient)


def _noted(operator: Operator, back: Pull, gradient: Tensor, found: Gradients) -> Tensor:
    of_values, of_coefficients = back(gradient)
    mine = found.setdefault(operator, {})
    for name, x in of_coefficients.items():
        mine[name] = mine[name] + x if name in mine else x
    return of_values


def _with_constant(operator: Operator, out: Tensor, factor: Tensor) -> Tensor:
    constant = operator.offset()
    return out if constant is None else out + factor * constant
