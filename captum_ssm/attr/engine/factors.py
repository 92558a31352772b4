"""Factors of a mixer's implicit attention: one matrix per state, or queries, keys and histories.

This module checks the user's options. The computation is in
:mod:`~captum_ssm.attr.engine.states` and :mod:`~captum_ssm.attr.engine.selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from ...errors import OptionError
from ...operators import Diagonal, Operator
from ...tracing import Layer
from ..call import checks
from .fold import Options
from .method import options
from .run import Run
from .selection import Factors, selection_factors
from .states import Term, products_of, state_matrices, terms_of

__all__ = ["Factors", "each_factor", "each_state"]


def each_state(
    channels: Sequence[int],
    components: str | Collection[str],
    verify: bool | float,
) -> tuple[Options, Callable[[Run, Layer], Tensor]]:
    """Check the options of ``states()``; return them, and a function that computes the matrices.

    The function returns the matrices (B, C, N, L, L) of N states for C ``channels``, given a run
    and one of its layers. ``components`` must include the scan and not the skip.
    """
    names = checks.parse_components(components)
    if "scan" not in names or "skip" in names:
        raise OptionError(
            f"components={components!r} cannot be split by state: components must include the "
            "scan, which has the states, and not the skip, which bypasses them. Pass 's6', "
            "'unified', or a set such as {'scan', 'gate'}; matrices() takes any components."
        )
    wanted = _checked(channels)
    chosen = options(names, None, None, 0, "paper", verify, keep_channels=True)

    def make(run: Run, layer: Layer) -> Tensor:
        operator = chosen.operator(layer)
        found = state_matrices(_terms(layer, operator), _counted(wanted, layer, operator))
        return found.to(run.request.inputs.device)

    return chosen, make


def each_factor(
    channels: Sequence[int], simplified: bool, verify: bool | float
) -> tuple[Options, Callable[[Run, Layer], Factors]]:
    """Check the options of ``factors()``; return them, and a function that computes the factors.

    The function returns the factors given a run and one of its layers. With ``simplified``, relu
    replaces softplus.
    """
    wanted = _checked(channels)
    checks.flags(simplified=simplified)
    chosen = options("s6", None, None, 0, "paper", verify, keep_channels=True)

    def make(run: Run, layer: Layer) -> Factors:
        operator = chosen.operator(layer)
        counted = _counted(wanted, layer, operator)
        factors = selection_factors(_terms(layer, operator), counted, simplified)
        if factors is None:
            raise OptionError(
                f"factors() needs a selective scan with a step size dt, as in Mamba and Mamba-2, "
                f"but layer {layer.name!r} ({layer.architecture}) has {_kinds(operator)}. Use "
                "states(), or pass layers=[...] without this layer."
            )
        return factors.to(run.request.inputs.device)

    return chosen, make


def _terms(layer: Layer, operator: Operator) -> list[Term]:
    """Return the terms of an operator, one per recurrence; raise if states cannot be separated."""
    terms = terms_of(operator)
    if terms is None:
        raise OptionError(
            f"Layer {layer.name!r} ({layer.architecture}) has no separate states. A layer must be "
            "a recurrence with a diagonal decay (SelectiveScan, ScalarDecayHeads, "
            f"VectorDecayHeads), but this one is {_kinds(operator)}. Pass layers=[...] without "
            "this layer, or use matrices(reduce=None), which returns one matrix per channel of any "
            "layer."
        )
    return terms


def _kinds(operator: Operator) -> str:
    """Return the class names of the operators that mix tokens, for an error."""
    parts = (part for product in products_of(operator) for part in product)
    kinds = {type(part).__name__ for part in parts if not isinstance(part, Diagonal)}
    return " and ".join(sorted(kinds)) or "no recurrence"


def _checked(channels: Sequence[int]) -> tuple[int, ...]:
    """Return the option ``channels`` as a tuple of at least one integer."""
    wanted = checks.integers("channels", channels, "channels")
    if not wanted:
        raise OptionError(
            f"channels={channels!r} must list at least one channel, for example channels=[0, 5]. "
            "A channel has an L x L matrix for every state, so name the channels you need."
        )
    return wanted


def _counted(channels: Sequence[int], layer: Layer, operator: Operator) -> list[int]:
    """Return nonnegative channel indices; raise if the layer lacks one of the channels."""
    count = operator.shape.heads * operator.shape.per_head
    outside = [channel for channel in channels if not -count <= channel < count]
    if outside:
        raise OptionError(
            f"channels={list(channels)} contains {outside}, but layer {layer.name!r} "
            f"({layer.architecture}) has channels 0 to {count - 1}. Pass numbers in this range, or "
            "negative ones, which count from the end."
        )
    return [channel % count for channel in channels]
