"""Factors of a mixer's implicit attention: one matrix per state, or queries, keys and histories.

This module checks the user's options. The computation is in
:mod:`~captum_ssm.attr.engine.states` and :mod:`~captum_ssm.attr.engine.selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

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

__all__ = ["Factors", "prepare_factors", "prepare_states"]

#: The options for all heads and layers, with one matrix per channel.
_options = partial(
    options, reduce=None, heads=None, start_layer=0, recipe="paper", keep_channels=True
)


def prepare_states(
    channels: Sequence[int], components: str | Collection[str], verify: bool | float
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
    indices = _channel_indices(channels)
    matrix_options = _options(names, verify=verify)

    def matrices_of(run: Run, layer: Layer) -> Tensor:
        operator = matrix_options.operator(layer)
        nonnegative = _nonnegative_channels(indices, layer, operator)
        return state_matrices(_terms(layer, operator), nonnegative).to(run.request.inputs.device)

    return matrix_options, matrices_of


def prepare_factors(
    channels: Sequence[int], simplified: bool, verify: bool | float
) -> tuple[Options, Callable[[Run, Layer], Factors]]:
    """Check the options of ``factors()``; return them, and a function that computes the factors.

    The function returns the factors given a run and one of its layers. With ``simplified``, relu
    replaces softplus.
    """
    indices = _channel_indices(channels)
    checks.flags(simplified=simplified)
    matrix_options = _options("s6", verify=verify)

    def factors_of(run: Run, layer: Layer) -> Factors:
        """Return a layer's factors on the device of the inputs; raise if its scan has no dt."""
        operator = matrix_options.operator(layer)
        nonnegative = _nonnegative_channels(indices, layer, operator)
        factors = selection_factors(_terms(layer, operator), nonnegative, simplified)
        if factors is None:
            raise OptionError(
                f"factors() needs a selective scan with a step size dt, as in Mamba and Mamba-2, "
                f"but layer {layer.name!r} ({layer.architecture}) has {_classes(operator)}. Use "
                "states(), or pass layers=[...] without this layer."
            )
        return factors.to(run.request.inputs.device)

    return matrix_options, factors_of


def _terms(layer: Layer, operator: Operator) -> list[Term]:
    """Return the terms of an operator, one per recurrence; raise if states cannot be separated."""
    terms = terms_of(operator)
    if terms is None:
        raise OptionError(
            f"Layer {layer.name!r} ({layer.architecture}) has no separate states. A layer must be "
            "a recurrence with a diagonal decay (SelectiveScan, ScalarDecayHeads, "
            f"VectorDecayHeads), but this one is {_classes(operator)}. Pass layers=[...] without "
            "this layer, or use matrices(reduce=None), which returns one matrix per channel of any "
            "layer."
        )
    return terms


def _classes(operator: Operator) -> str:
    """Return the class names of the operators that mix tokens, for an error."""
    parts = (part for product in products_of(operator) for part in product)
    names = {type(part).__name__ for part in parts if not isinstance(part, Diagonal)}
    return " and ".join(sorted(names)) or "no recurrence"


def _channel_indices(channels: Sequence[int]) -> tuple[int, ...]:
    """Return the option ``channels`` as a tuple of at least one integer."""
    indices = checks.integers("channels", channels, "channels")
    if not indices:
        raise OptionError(
            f"channels={channels!r} must list at least one channel, for example channels=[0, 5]. "
            "A channel has an L x L matrix for every state, so name the channels you need."
        )
    return indices


def _nonnegative_channels(channels: Sequence[int], layer: Layer, operator: Operator) -> list[int]:
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
