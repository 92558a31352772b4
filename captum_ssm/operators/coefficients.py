"""Operators as functions of their coefficients: what those do, and how the outputs follow them.

An operator is linear in its values, and its coefficients are frozen.  In the network they follow
from the input, each in a role: what a token asks for (query), what it is matched by (key), how far
a state moves on at it (step), how much of it is let through (gate).  Beside these stands what is
moved, the values (content).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .base import Operator, Role
from .chain import Chain
from .combine import Composite, DirectSum, Sum
from .reorder import Permute, Windowed

ROLES: tuple[Role, ...] = ("content", "key", "query", "gate", "step")

#: Gradients of the coefficients of leaves, by name.
Gradients = dict[Operator, dict[str, Tensor]]


def live_coefficients(operator: Operator) -> dict[tuple[Operator, str], Tensor]:
    """The coefficients that came with their graph, by who holds them and the name there.

    Args:
        operator: chains and sums of any depth.

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


def pullback(
    operator: Operator,
    values: Tensor,
    gradient: Tensor,
    at: Mapping[Operator, Operator],
    found: Gradients,
    offset: float = 1.0,
) -> Tensor:
    """The gradient of values and of live coefficients, given that of what becomes of the values.

    Args:
        operator: chains and sums of any depth.
        values: what it acts on, (B, L, H, P).
        gradient: that of its outputs, (B, L, H, P).
        at: operators that stand in the place of parts, such as ones with other coefficients.
        found: takes up the gradients of the coefficients of parts that have live ones.
        offset: factor on the constants that operators add inside. Default: 1.0.

    Returns:
        The gradient of the values.
    """
    if operator.live:
        of_values, of_coefficients = at.get(operator, operator).backward(values, gradient)
        mine = found.setdefault(operator, {})
        for name, x in of_coefficients.items():
            mine[name] = mine[name] + x if name in mine else x
        return of_values
    if isinstance(operator, Chain):
        inputs = [values]
        for part in operator.parts[:0:-1]:
            inputs.append(_applied(part, inputs[-1], at, offset))
        for part in operator.parts:
            gradient = pullback(part, inputs.pop(), gradient, at, found, offset)
        return gradient
    if isinstance(operator, Sum):
        terms = [pullback(p, values, gradient, at, found, offset) for p in operator.parts]
        return torch.stack(terms).sum(0)
    if isinstance(operator, DirectSum):
        heads = [part.shape.heads for part in operator.parts]
        shares = (torch.split(x, heads, -2) for x in (values, gradient))
        parts = zip(operator.parts, *shares, strict=True)
        return torch.cat([pullback(p, v, g, at, found, offset) for p, v, g in parts], -2)
    if isinstance(operator, Windowed):
        cut = operator.entering(values, offset), operator.windows.cut(gradient)
        return operator.windows.merge(pullback(operator.inner, *cut, at, found, offset))
    return at.get(operator, operator).transpose(gradient)


def _applied(
    operator: Operator, values: Tensor, at: Mapping[Operator, Operator], offset: float
) -> Tensor:
    """What becomes of the values."""
    here = at.get(operator, operator)
    if isinstance(operator, Chain):
        for part in operator.parts[::-1]:
            values = _applied(part, values, at, offset)
        return values
    if here is operator and isinstance(operator, Sum):
        return torch.stack([_applied(p, values, at, offset) for p in operator.parts]).sum(0)
    if isinstance(operator, DirectSum):
        heads = [part.shape.heads for part in operator.parts]
        parts = zip(operator.parts, torch.split(values, heads, -2), strict=True)
        return torch.cat([_applied(p, v, at, offset) for p, v in parts], -2)
    if isinstance(operator, Windowed):
        inside = _applied(operator.inner, operator.entering(values, offset), at, offset)
        return operator.windows.merge(inside)
    out, constant = here.apply(values), here.offset()
    return out if constant is None else out + offset * constant
