"""A linearised mixer as part of a linear network."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..mixers.base import LinearMixer, joined_end_to_end
from ..operators import Chain, Diagonal, Operator, Sum
from ..operators.kernels.arithmetic import unseen
from ..operators.readings.coefficients import follow_mask, live_coefficients
from .mode import Linearising
from .shares import FAMILY, Rule, is_shared, shared


def through(
    linear: LinearMixer, mode: Linearising, inside: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """What the mixer returns, computed so that its graph is linear, (B, L, E).

    Args:
        linear: the mixer, linearised at a live input.
        mode: the rules; the output projection runs under them, so it must be on.
        inside: what goes on from what the operator returns, (B, L, H, P). Default: None, it.
    """
    project, operator, values = linear.project, linear.operator, [linear.values]
    mask, end_to_end = linear.mask, linear.end_to_end
    del linear  # of long inputs the values take much: they are let go of once they are read
    _cut(operator, mode.rule)
    out = _apply(operator, values, mode, mask)
    out = project(out if inside is None else inside(out))
    return joined_end_to_end(out, mask) if end_to_end else out


def _cut(operator: Operator, rule: Rule) -> None:
    """Let go of the graphs of coefficients that get no share by a rule."""
    for (leaf, name), coefficient in live_coefficients(operator).items():
        if leaf.roles[name] not in FAMILY[rule]:
            leaf.live = {**leaf.live, name: coefficient.detach()}


def _apply(
    operator: Operator, given: list[Tensor], mode: Linearising, mask: Tensor | None
) -> Tensor:
    """What an operator makes of values, taken out of a list so that nobody else holds them."""
    if isinstance(operator, Chain):
        # LRP's half is of products of two, one after the other
        together = mode.divides and mode.rule != "half"
        for place in reversed(range(len(operator.parts))):
            if together and is_shared(operator.parts[place], mode.rule):
                outer = Chain(*operator.parts[: place + 1])
                with unseen():
                    return shared(outer, given.pop(), mode.rule, mode.ledger, mode.labels, mask)
            given.append(_apply(operator.parts[place], given, mode, mask))
            mask = follow_mask(operator.parts[place], mask, {})
        return given.pop()
    if isinstance(operator, Sum) and not operator.live:
        first, *others = operator.parts
        total = _apply(first, given[:] if others else given, mode, mask)
        for part in others:
            total = total + _apply(part, given if part is others[-1] else given[:], mode, mask)
        return total
    v = given.pop()
    if mode.divides and is_shared(operator, mode.rule):
        with unseen():
            return shared(operator, v, mode.rule, mode.ledger, mode.labels, mask)
    if isinstance(operator, Diagonal) and operator.component == "gate" and mode.rule == "half":
        return v * operator.live.get("weight", operator.weight)
    with unseen():
        out = operator.apply(v)
        bias = operator.offset()
        # noted as it is: the mode would spread a bias common to all tokens over them
        return out if bias is None else mode.ledger.included(out + bias, bias)
