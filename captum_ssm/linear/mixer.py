"""A linearised mixer as part of a linear network."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..mixers.base import LinearMixer
from ..operators import Chain, Diagonal, Operator, Sum
from ..operators.coefficients import follow_mask
from ..operators.kernels.arithmetic import unseen
from .mode import Linearising
from .shares import is_shared, shared


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
    mask = linear.mask
    del linear  # of long inputs the values take much: they are let go of once they are read
    out = _apply(operator, values.pop(), mode, mask)
    return project(out if inside is None else inside(out))


def _apply(operator: Operator, v: Tensor, mode: Linearising, mask: Tensor | None) -> Tensor:
    if isinstance(operator, Chain):
        for place in reversed(range(len(operator.parts))):
            if mode.divides and is_shared(operator.parts[place], mode.rule):
                outer = Chain(*operator.parts[: place + 1])
                with unseen():
                    return shared(outer, v, mode.rule, mode.ledger, mode.labels, mask)
            v = _apply(operator.parts[place], v, mode, mask)
            mask = follow_mask(operator.parts[place], mask, {})
        return v
    if isinstance(operator, Sum) and not operator.live:
        total = _apply(operator.parts[0], v, mode, mask)
        for part in operator.parts[1:]:
            total = total + _apply(part, v, mode, mask)
        return total
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
