"""Operators with a fault: one coefficient of one component is off."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from captum_ssm.mixers import LinearMixer
from captum_ssm.operators import (
    Chain,
    DeltaRule,
    Diagonal,
    ElementwiseRecurrence,
    Operator,
    ScalarDecayHeads,
    SelectiveScan,
    Sum,
    VectorDecayHeads,
)

#: What a coefficient is multiplied with; more than 1 would make some decays grow.
OFF = 0.99


class Coefficient(NamedTuple):
    """One of an operator's: which of its leaves, the part that it stands for, the name there."""

    leaf: int
    component: str
    name: str


#: What stands for the output projection, which is no part of the operator.
OUT_PROJ = Coefficient(-1, "out_proj", "weight")


def coefficients(linear: LinearMixer) -> list[Coefficient]:
    """All that can be off in a mixer."""
    found = [
        Coefficient(i, leaf.component or "mask", name)
        for i, leaf in enumerate(linear.operator.leaves())
        for name in leaf.tensors()
    ]
    return [*found, OUT_PROJ]


def planted(linear: LinearMixer, fault: Coefficient, token: int | None = None) -> LinearMixer:
    """The mixer with one coefficient off, for all tokens or for one.

    Args:
        linear: the mixer.
        fault: the coefficient.
        token: the token. A coefficient that is the same for all tokens is off in what its part
            makes at that one. Default: None, all.
    """
    factor = linear.values.new_full((1, linear.values.shape[1], 1, 1), OFF if token is None else 1)
    if token is not None:
        factor[:, token] = OFF
    if fault == OUT_PROJ:  # what enters it is off alike
        enters = Diagonal(factor if token is not None else factor * OFF, linear.operator.shape)
        return replace(linear, operator=Chain(enters, linear.operator))
    wrong = list(linear.operator.leaves())[fault.leaf]
    coefficient = wrong.tensors()[fault.name]
    if token is None:
        off = _with(wrong, coefficient, factor.new_full((), OFF))
    elif isinstance(wrong, _BY_TOKEN) and coefficient.shape[1:2] == factor.shape[1:2]:
        off = _with(wrong, coefficient, factor)
    else:
        off = Chain(Diagonal(factor, wrong.shape, wrong.component), wrong)
    return replace(linear, operator=_put(linear.operator, wrong, off))


#: Of their coefficients those that have tokens have them second.
_BY_TOKEN = (
    DeltaRule, Diagonal, ElementwiseRecurrence, ScalarDecayHeads, SelectiveScan, VectorDecayHeads,
)  # fmt: skip


def _with(leaf: Operator, coefficient: Tensor, factor: Tensor) -> Operator:
    """The leaf with one of its coefficients times a factor (1, L, 1, 1), or one for all tokens."""
    if isinstance(leaf, Diagonal):
        weight = leaf.live.get("weight", leaf.weight)
        return Diagonal(weight * factor, leaf.shape, leaf.component)
    off = copy.copy(leaf)
    (name,) = (name for name, value in vars(leaf).items() if value is coefficient)
    scale = factor.view(-1, *(1,) * (coefficient.dim() - 2)) if factor.numel() > 1 else factor
    setattr(off, name, coefficient * scale)
    return off


def _put(operator: Operator, old: Operator, new: Operator) -> Operator:
    """The operator with one of its leaves exchanged."""
    if operator is old:
        return new
    if isinstance(operator, Chain | Sum):
        kind = Chain if isinstance(operator, Chain) else Sum
        return kind(*(_put(part, old, new) for part in operator.parts))
    return operator
