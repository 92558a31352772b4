"""Captum methods that explain state-space, gated-linear-RNN and hybrid models.

CONTRIBUTING.md lists the files to read first, and docs/words.md is a glossary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._optional import on_first_use
from .errors import CaptumSSMError

if TYPE_CHECKING:
    from .attr import (
        ImplicitAttention,
        ImplicitAttentionRollout,
        LatimALTI,
        LatimFlow,
        LatimLogit,
        LatimNorm,
        MambaAttribution,
        MambaLRP,
        SSMLLMAttribution,
        StateMemory,
        SumTarget,
        TransformerAttribution,
        compare,
        load,
    )
    from .edges import EdgeEffects, Edges, knock_out, variant_effects
    from .inside import (
        Feature,
        LayerLatimFlow,
        LayerMambaLRP,
        NeuronLatimFlow,
        NeuronMambaLRP,
        attribution_graph,
    )
    from .linear.norms import frozen_norms
    from .mixers import register_mixer, supported_architectures
    from .operators import discard_smallest
    from .tracing import trace
    from .viz import report

__version__ = "0.2.0"

# ``import captum_ssm`` is fast: each name's module is imported when the name is first used.
__getattr__ = on_first_use(
    __name__,
    {
        "edges": "EdgeEffects Edges knock_out variant_effects",
        "inside": "Feature LayerLatimFlow LayerMambaLRP NeuronLatimFlow NeuronMambaLRP "
        "attribution_graph",
        "attr": "ImplicitAttention ImplicitAttentionRollout LatimALTI LatimFlow LatimLogit "
        "LatimNorm MambaAttribution MambaLRP SSMLLMAttribution StateMemory SumTarget "
        "TransformerAttribution compare load",
        "operators": "discard_smallest",
        "mixers": "register_mixer supported_architectures",
        "linear.norms": "frozen_norms",
        "viz": "report",
        "tracing": "trace",
    },
)

__all__ = [
    "CaptumSSMError",
    "EdgeEffects",
    "Edges",
    "Feature",
    "ImplicitAttention",
    "ImplicitAttentionRollout",
    "LatimALTI",
    "LatimFlow",
    "LatimLogit",
    "LatimNorm",
    "LayerLatimFlow",
    "LayerMambaLRP",
    "MambaAttribution",
    "MambaLRP",
    "NeuronLatimFlow",
    "NeuronMambaLRP",
    "SSMLLMAttribution",
    "StateMemory",
    "SumTarget",
    "TransformerAttribution",
    "attribution_graph",
    "compare",
    "discard_smallest",
    "frozen_norms",
    "knock_out",
    "load",
    "register_mixer",
    "report",
    "supported_architectures",
    "trace",
    "variant_effects",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
