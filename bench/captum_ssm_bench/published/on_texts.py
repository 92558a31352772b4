"""What the hidden-attention (HA) and unified (UN) papers say of relevance of words.

The published numbers are of language models that were asked questions, or of classifiers of
reviews; here the texts are others, and all models are classifiers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..experiments.token_maps import NO_CLAMP, REDUCTIONS
from ..harness.verdicts import Comparison, Side, stated
from .on_tokens import MAMBA

RWKV = "-rwkv"

_COLUMNS = ("AUAC", "AU-MSE")
_UNIFIED, _S6 = (Side("MambaAttribution", name) for name in ("unified", "s6"))
_MEAN, _MAX, _MIN = (
    Side("ImplicitAttentionRollout", name)
    for name in ("s6", *(f"s6, {reduction}" for reduction in REDUCTIONS))
)
_UNCLAMPED = Side("MambaAttribution", f"s6, {NO_CLAMP}")


def _formulations() -> Iterator[Comparison]:
    """UN table 2, of two sizes of models; and its figure 6, which has curves alone.

    RWKV's formulations differ by the gate, which is what the figure's first column shows.
    """
    numbers = {
        _UNIFIED: ("0.934 and 0.939", "1.588 and 1.082"),
        _S6: ("0.915 and 0.918", "1.765 and 1.239"),
    }
    yield from stated("valence", "UN, table 2", _COLUMNS, numbers, [(_UNIFIED, _S6)], MAMBA)
    for column in _COLUMNS:
        yield Comparison("valence", column, _UNIFIED, _S6, "UN, figure 6", models=RWKV)


def _choices() -> Iterator[Comparison]:
    """HA table 9, whose reductions are those of rollout, as in its table 5."""
    numbers: dict[Side, tuple[float, float]] = {
        _S6: (0.915, 1.765),
        _MEAN: (0.8813, 2.102),
        _MAX: (0.8420, 1.899),
        _MIN: (0.7611, 2.344),
        _UNCLAMPED: (0.7564, 2.421),
    }
    pairs = [(_S6, other) for other in numbers if other != _S6]
    yield from stated("valence", "HA, table 9", _COLUMNS, numbers, pairs, MAMBA)


#: All that is said of words.
TEXTS: tuple[Comparison, ...] = (*_formulations(), *_choices())
