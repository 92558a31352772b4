"""What the papers do not say, asked here: does the exact division of the activation, do the exact
relevances of the whole network find sources better than their methods?"""

from __future__ import annotations

from collections.abc import Iterator

from ..harness.verdicts import Comparison, Side
from .on_tokens import ALTI, ATTENTION, ATTRIBUTION, LOGIT, LRP, NORM

SOURCE = "asked here"
FLOW = Side("LatimFlow", "frozen")
#: The experiments, with the column that is decided by; the top source of a passkey's digit may be
#: any digit of it, so that it decides little.
_COLUMNS = {
    "copying": "top 1",
    "translation": "AER",
    "passkey": "AP",
    "two-passkeys": "AP",
    "frequent-word": "AP",
    "recall": "top 1",
}
_PUBLISHED = (ATTENTION, ATTRIBUTION, NORM, ALTI, LOGIT, LRP)
_USUAL = (Side("IntegratedGradients"), Side("FeatureAblation"))


def _exact_activation() -> Iterator[Comparison]:
    for experiment, column in _COLUMNS.items():
        for silu in (NORM, ALTI, LOGIT):
            exact = silu._replace(formulation="linearized")
            yield Comparison(experiment, column, exact, silu, SOURCE)


def _flow() -> Iterator[Comparison]:
    for experiment, column in _COLUMNS.items():
        for other in (*_PUBLISHED, *_USUAL):
            yield Comparison(experiment, column, FLOW, other, SOURCE)


def _formulation() -> Iterator[Comparison]:
    for experiment, column in _COLUMNS.items():
        for s6 in (ATTENTION, ATTRIBUTION):
            unified = s6._replace(formulation="unified")
            yield Comparison(experiment, column, unified, s6, SOURCE)


#: Each states the better side that it is asked about.
BEYOND: tuple[Comparison, ...] = (*_exact_activation(), *_flow(), *_formulation())
