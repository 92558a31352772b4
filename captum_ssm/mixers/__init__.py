"""Adapters of architectures, and functions that help to write adapters.

An adapter takes a mixer module and one recorded Call of the module, and returns a LinearMixer.
"""

from .base import Call, Linearize, LinearMixer
from .parts.common import activation_ratio, as_heads, causal_conv, linear, run, working_dtype
from .parts.softmax import softmax_attention
from .path import Path
from .registry import register_mixer, supported_architectures
from .table import Architecture

__all__ = [
    "Architecture",
    "Call",
    "LinearMixer",
    "Linearize",
    "Path",
    "activation_ratio",
    "as_heads",
    "causal_conv",
    "linear",
    "register_mixer",
    "run",
    "softmax_attention",
    "supported_architectures",
    "working_dtype",
]
