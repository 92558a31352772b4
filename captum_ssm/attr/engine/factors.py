"""Factors of a mixer's implicit attention: matrices per state; queries, keys and histories.

The computation is in :mod:`~captum_ssm.attr.engine.states` and
:mod:`~captum_ssm.attr.engine.selection`; here the user's choices meet a layer.
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
    """Check the user's options; return them, and a function of a run and layer: (B, C, N, L, L).

    Args:
        channels: the channels wanted, C of them; negative ones count from the end.
        components: components with the scan and without the skip.
        verify: as the user gave it.
    """
    names = checks.parse_components(components)
    if "scan" not in names or "skip" in names:
        raise OptionError(
            f"components={components!r} are not a sum over states: name the scan, whose states "
            "they are, and leave out the skip, which passes by them. Use 's6', 'unified', or a set "
            "such as {'scan', 'gate'}; matrices() takes any components."
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
    """Check the user's options; return them, and a function of a run and layer: its factors.

    Args:
        channels, verify: as in :func:`each_state`.
        simplified: whether relu takes the place of softplus.
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
                f"Layer {layer.name!r} ({layer.architecture}) has no query, key and history "
                "factors, which selective scans with a step size dt have, as in Mamba and Mamba-2; "
                f"its {_kinds(operator)} has none. Use states(), or leave the layer out of "
                "factors() with layers=[...]."
            )
        return factors.to(run.request.inputs.device)

    return chosen, make


def _terms(layer: Layer, operator: Operator) -> list[Term]:
    """Return an operator's sum over states as terms; raise if it is none."""
    terms = terms_of(operator)
    if terms is None:
        raise OptionError(
            f"Layer {layer.name!r} ({layer.architecture}) has no states to sum over: only "
            "recurrences with a diagonal decay do (SelectiveScan, ScalarDecayHeads, "
            f"VectorDecayHeads), and its matrices come from {_kinds(operator)}. Leave the "
            "layer out with layers=[...]; matrices(reduce=None) has one matrix per channel of any "
            "layer."
        )
    return terms


def _kinds(operator: Operator) -> str:
    """Name the classes of the operators that mix tokens."""
    parts = (part for product in products_of(operator) for part in product)
    kinds = {type(part).__name__ for part in parts if not isinstance(part, Diagonal)}
    return " and ".join(sorted(kinds)) or "no recurrence"


def _checked(channels: Sequence[int]) -> tuple[int, ...]:
    wanted = checks.integers("channels", channels, "channels")
    if not wanted:
        raise OptionError(
            f"channels={channels!r} must list at least one channel, for example channels=[0, 5]. "
            "A channel has an L x L matrix for every state, so name the channels you need."
        )
    return wanted


def _counted(channels: Sequence[int], layer: Layer, operator: Operator) -> list[int]:
    """Return the channels counted from 0; raise for one that the layer does not have."""
    count = operator.shape.heads * operator.shape.per_head
    outside = [channel for channel in channels if not -count <= channel < count]
    if outside:
        raise OptionError(
            f"channels={list(channels)} names {outside}, but layer {layer.name!r} "
            f"({layer.architecture}) has channels 0 to {count - 1}; negative ones count from the "
            "end."
        )
    return [channel % count for channel in channels]
