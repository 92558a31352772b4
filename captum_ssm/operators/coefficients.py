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
    operator: Operator, mask: Tensor | None, input_masks: dict[Operator, Tensor | None]
) -> Tensor | None:
    """Return the mask of real tokens (B, L) at the operator's output; None if all are real.

    Args:
        operator: an operator, which may nest chains and sums.
        mask: mask of real tokens at the operator's input (B, L); None if all are real.
        input_masks: this dictionary receives the mask at the input of every operator inside.
    """
    input_masks[operator] = mask
    if isinstance(operator, Chain):
        for part in operator.parts[::-1]:
            mask = follow_mask(part, mask, input_masks)
        return mask
    if isinstance(operator, Sum | DirectSum):
        outgoing = mask
        for part in operator.parts:  # each returns the tokens in the same order
            outgoing = follow_mask(part, mask, input_masks)
        return outgoing
    if isinstance(operator, Windowed):
        follow_mask(operator.within, operator.windows.mask(mask, operator.shape.batch), input_masks)
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
    if operator.live:  # first, because WKV is a Sum with coefficients
        out, back = operator.vjp(values, moved.get(operator, {}))
        return _with_constant(operator, out, offset), partial(_pull_back, operator, back)
    if isinstance(operator, Chain):
        backs = []
        for part in operator.parts[::-1]:
            values, back_of_part = vjp(part, values, moved, offset)
            backs.append(back_of_part)
        # the part that acted last is pulled back first
        return values, lambda gradient, totals: reduce(
            lambda g, back: back(g, totals), backs[::-1], gradient
        )
    if isinstance(operator, Sum):
        outs, pulls = zip(*(vjp(p, values, moved, offset) for p in operator.parts), strict=True)
        return sum_tensors(outs), lambda gradient, totals: sum_tensors(
            pull(gradient, totals) for pull in pulls
        )
    if isinstance(operator, DirectSum):
        heads = [part.shape.heads for part in operator.parts]
        pairs = zip(operator.parts, torch.split(values, heads, -2), strict=True)
        outs, pulls = zip(*(vjp(p, v, moved, offset) for p, v in pairs), strict=True)

        def pull_heads(gradient: Tensor, totals: Gradients) -> Tensor:
            """Pull each part's heads of the gradient back through the part."""
            split = torch.split(gradient, heads, -2)
            return torch.cat([pull(g, totals) for pull, g in zip(pulls, split, strict=True)], -2)

        return torch.cat(outs, -2), pull_heads
    if isinstance(operator, Windowed):
        windows, inputs = operator.windows, operator.inner_input(values, offset)
        out, pull_within = vjp(operator.within, inputs, moved, offset)
        return windows.merge(out), lambda gradient, totals: windows.merge(
            pull_within(windows.cut(gradient), totals)
        )
    out = _with_constant(operator, operator.apply(values), offset)
    return out, lambda gradient, _: operator.transpose(gradient)  # no live coefficients


def _pull_back(operator: Operator, back: Pull, gradient: Tensor, totals: Gradients) -> Tensor:
    """Return the values' gradient from ``back``; add coefficients' gradients to ``totals``."""
    of_values, of_coefficients = back(gradient)
    total = totals.setdefault(operator, {})
    for name, x in of_coefficients.items():
        total[name] = total[name] + x if name in total else x
    return of_values


def _with_constant(operator: Operator, out: Tensor, factor: Tensor) -> Tensor:
    """Return ``out`` plus ``factor`` times the constant of the operator's biases."""
    constant = operator.offset()
    return out if constant is None else out + factor * constant
