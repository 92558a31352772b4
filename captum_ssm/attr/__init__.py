"""Methods, one file each: Captum Attribution classes over reduce and fold."""

from .implicit_attention import ImplicitAttention
from .mamba_attribution import MambaAttribution
from .rollout import ImplicitAttentionRollout

__all__ = ["ImplicitAttention", "ImplicitAttentionRollout", "MambaAttribution"]
