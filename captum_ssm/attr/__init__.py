"""Attribution methods, one file each, as subclasses of Captum's Attribution."""

from .call.dense import mean_over
from .call.targets import SumTarget
from .comparison import Comparison, compare
from .engine.result import load
from .flow import LatimFlow, MambaLRP
from .implicit_attention import ImplicitAttention
from .latim_alti import LatimALTI
from .latim_logit import LatimLogit
from .latim_norm import LatimNorm
from .mamba_attribution import MambaAttribution
from .memory import StateMemory
from .rollout import ImplicitAttentionRollout
from .text.llm import SSMLLMAttribution
from .text.result import SSMLLMAttributionResult
from .transformer_attribution import TransformerAttribution

__all__ = [
    "Comparison",
    "ImplicitAttention",
    "ImplicitAttentionRollout",
    "LatimALTI",
    "LatimFlow",
    "LatimLogit",
    "LatimNorm",
    "MambaAttribution",
    "MambaLRP",
    "SSMLLMAttribution",
    "SSMLLMAttributionResult",
    "StateMemory",
    "SumTarget",
    "TransformerAttribution",
    "compare",
    "load",
    "mean_over",
]
