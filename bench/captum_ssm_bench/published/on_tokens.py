"""Which methods LATIM says find sources of tokens better than others.

Where the paper looks at one layer, the best one is taken here.  Its own maps are those with
SiLU; Mamba-Attention and -Attribution are those of the hidden-attention paper.
"""

from __future__ import annotations

from itertools import product

from ..experiments.passkeys import (
    FIRST_OF_FOUR,
    FIRST_OF_TWO,
    FOUR,
    LATER_OF_FOUR,
    LATER_OF_TWO,
    ONE,
    TWO,
)
from ..experiments.repeated_words import FIRST, LAST
from ..harness.verdicts import BEST, Comparison, Side, stated

#: What the names of models of one architecture end with.
MAMBA, MAMBA2 = "-mamba", "-mamba2"

ATTENTION, ATTRIBUTION = Side("ImplicitAttention", "s6", BEST), Side("MambaAttribution", "s6")
LRP = Side("MambaLRP", "half")
NORM, ALTI = Side("LatimNorm l2", "silu", BEST), Side("LatimALTI", "silu", BEST)
LOGIT = Side("LatimLogit", "silu")

_LATIM, _BEFORE = (NORM, ALTI, LOGIT), (ATTENTION, ATTRIBUTION)

_COPYING = [
    *stated(
        "copying",
        "LATIM, table 2",
        ("AUC", "AP", "R@K"),
        {
            ATTENTION: (0.84, 0.36, 0.22),
            ATTRIBUTION: (0.83, 0.31, 0.19),
            LRP: (0.40, 0.22, 0.20),
            NORM: (0.88, 0.41, 0.27),
            ALTI: (0.86, 0.47, 0.36),
            LOGIT: (0.85, 0.44, 0.31),
        },
        product(_LATIM, (*_BEFORE, LRP)),
        MAMBA,
    ),
    *stated(
        "copying",
        "LATIM, table 2",
        ("AUC", "AP", "R@K"),
        {
            ATTENTION: (0.79, 0.49, 0.39),
            ATTRIBUTION: (0.79, 0.47, 0.39),
            NORM: (0.98, 0.86, 0.74),
            ALTI: (0.85, 0.71, 0.63),
            LOGIT: (0.87, 0.70, 0.61),
        },
        product(_LATIM, _BEFORE),
        MAMBA2,
    ),
]
#: Ranges over sizes of models and pairs of languages.
_ALIGNMENT = [
    *stated(
        "translation",
        "LATIM, table 3",
        ("AER",),
        {
            ATTENTION: ("0.79-0.85",),
            ATTRIBUTION: ("0.68-0.87",),
            LRP: ("0.47-0.68",),
            NORM: ("0.44-0.49",),
            ALTI: ("0.52-0.55",),
            LOGIT: ("0.67-0.71",),
        },
        [*product((NORM, ALTI), _BEFORE), (NORM, ALTI), (NORM, LOGIT), (LRP, LOGIT)],
        MAMBA,
    ),
    *stated(
        "translation",
        "LATIM, table 3",
        ("AER",),
        {
            ATTENTION: ("0.69-0.85",),
            ATTRIBUTION: ("0.66-0.82",),
            NORM: ("0.35-0.52",),
            ALTI: ("0.38-0.51",),
            LOGIT: ("0.60-0.76",),
        },
        [*product((NORM, ALTI), _BEFORE), (NORM, LOGIT)],
        MAMBA2,
    ),
]

_SILU = Side("Latim", "silu", "mean")
_OTHERS = [Side("Latim", name, "mean") for name in ("taylor1", "taylor2", "relu", "identity")]
_FIRST, _SECOND = (Side("Latim", "silu", f"layer {i}") for i in range(2))
_EARLY, _LATE = (Side("LatimNorm l2", "silu", row) for row in (FIRST, LAST))
_ONE, _TWO, _FOUR = (Side(*cell) for cell in (ONE, TWO, FOUR))
_FIRST_OF_TWO, _LATER_OF_TWO = Side(*FIRST_OF_TWO), Side(*LATER_OF_TWO)
_FIRST_OF_FOUR, _LATER_OF_FOUR = Side(*FIRST_OF_FOUR), Side(*LATER_OF_FOUR)

_RETRIEVAL = [
    Comparison("passkey", "AP", NORM, ATTENTION, "LATIM, figure 8", models=MAMBA2),
    Comparison("two-passkeys", "AP", NORM, ATTENTION, "LATIM, figure 8", models=MAMBA2),
    Comparison("repeated-words", "multiple", _EARLY, _LATE, "LATIM, figure 9"),
]
#: Ranges over sizes of models, of texts with 1024 tokens; the rows are of the models' answers.
_ANSWERS = [
    *stated(
        "retrieval",
        "LATIM, table 5",
        ("accuracy",),
        {_ONE: ("99.3-100",), _TWO: ("57.6-68.1",), _FOUR: ("28.1-60.2",)},
        [(_ONE, _TWO), (_ONE, _FOUR), (_TWO, _FOUR)],
        MAMBA2,
    ),
    *stated(
        "retrieval",
        "LATIM, table 6",
        ("accuracy",),
        {
            _FIRST_OF_TWO: ("65.4-81.7",),
            _LATER_OF_TWO: ("41.2-59.1",),
            _FIRST_OF_FOUR: ("46.9-82.0",),
            _LATER_OF_FOUR: ("22.2-53.4",),
        },
        [(_FIRST_OF_TWO, _LATER_OF_TWO), (_FIRST_OF_FOUR, _LATER_OF_FOUR)],
        MAMBA2,
    ),
]
_ERRORS = [
    *(Comparison("decomposition-error", "error", _SILU, s, "LATIM, figure 4") for s in _OTHERS),
    *stated(
        "decomposition-error",
        "LATIM, table 4",
        ("error",),
        {_FIRST: ("0.21",), _SECOND: ("0.45 and 0.57 in deeper layers",)},
        [(_FIRST, _SECOND)],
    ),
]

#: All that is said of tokens.
TOKENS: tuple[Comparison, ...] = (*_COPYING, *_ALIGNMENT, *_RETRIEVAL, *_ANSWERS, *_ERRORS)
