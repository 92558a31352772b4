"""Which components of a mixer an implicit attention matrix includes."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ...errors import OptionError
from ...operators.base import COMPONENTS

#: ``s6``: the scan alone (hidden-attention paper, eq. 14).  ``unified``: with convolution,
#: activation, gate and norm (unified paper, eqs. 9, 11, 17, 21).  ``exact``: the skip as well, so
#: that the matrices times the values, plus the bias, are the mixer's output.
PRESETS: dict[str, frozenset[str]] = {
    "s6": frozenset({"scan"}),
    "unified": COMPONENTS - {"skip"},
    "exact": COMPONENTS,
}


def parse_components(components: str | Collection[str]) -> frozenset[str]:
    """The set of components a user's choice names.

    Args:
        components: a preset (``"s6"``, ``"unified"``, ``"exact"``), a preset without some parts
            (``"unified-conv"``, ``"exact-gate-skip"``), or any collection of component names.
    """
    if isinstance(components, str):
        preset, *removed = components.split("-")
        if preset not in PRESETS or not COMPONENTS.issuperset(removed):
            raise OptionError(
                f"components={components!r} is not known. Use {', '.join(map(repr, PRESETS))}, one "
                "of them without some parts ('unified-conv'), or a set of names out of "
                f"{sorted(COMPONENTS)}."
            )
        chosen = PRESETS[preset] - set(removed)
    else:
        listed = isinstance(components, Collection) and not isinstance(components, Tensor)
        names = listed and all(isinstance(part, str) for part in components)
        chosen = frozenset(components) if names else frozenset()
    if not chosen or not chosen <= COMPONENTS:
        raise OptionError(
            f"components={components!r} must leave at least one component, and name none but "
            f"{sorted(COMPONENTS)}."
        )
    return chosen
