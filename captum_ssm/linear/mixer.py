"""A linearised mixer as part of a linear network."""

from __future__ import annotations

from torch import Tensor

from ..mixers.base import LinearMixer
from ..operators import Chain, Diagonal, Operator, Sum
from ..operators.kernels.arithmetic import unseen
from .mode import Linearising


def through(linear: LinearMixer, mode: Linearising) -> Tensor:
    """What the mixer returns, computed so that its graph is linear, (B, L, E).

    Args:
        linear: the mixer, linearised at a live input.
        mode: the rules; the output projection runs under them, so it must be on.
    """
    project, operator, values = linear.project, linear.operator, [linear.values]
    del linear  # of long inputs the values take much: they are let go of once they are read
    return project(_apply(operator, values.pop(), mode))


def _apply(operator: Operator, v: Tensor, mode: Linearising) -> Tensor:
    if isinstance(operator, Chain):
        for part in reversed(operator.parts):
            v = _apply(part, v, mode)
        return v
    if isinstance(operator, Sum):
        total = _apply(operator.parts[0], v, mode)
        for part in operator.parts[1:]:
            total = total + _apply(part, v, mode)
        return total
    if isinstance(operator, Diagonal) and operator.component == "gate" and mode.gate == "half":
        return v * operator.source
    with unseen():
        out = operator.apply(v)
        bias = operator.offset()
        # noted as it is: the mode would spread a bias common to all tokens over them
        return out if bias is None else mode.ledger.included(out + bias, bias)
