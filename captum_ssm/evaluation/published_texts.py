"""Which relevance of words the unified paper (UN) says a class follows from more than others."""

from __future__ import annotations

from .published_tokens import MAMBA
from .verdicts import Comparison, Side, stated

_UNIFIED, _S6 = (Side("MambaAttribution", name) for name in ("unified", "s6"))

#: The published numbers are of two sizes of models; here the texts are others, and are classified.
TEXTS: tuple[Comparison, ...] = tuple(
    stated(
        "valence",
        "UN, table 2",
        ("AUAC", "AU-MSE"),
        {
            _UNIFIED: ("0.934 and 0.939", "1.588 and 1.082"),
            _S6: ("0.915 and 0.918", "1.765 and 1.239"),
        },
        [(_UNIFIED, _S6)],
        MAMBA,
    )
)
