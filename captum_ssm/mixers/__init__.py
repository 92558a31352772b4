"""Architectures: a module and one of its calls in, a linear mixer out."""

from .base import Call, Linearize, LinearMixer
from .registry import Architecture, register_mixer, supported_architectures

__all__ = [
    "Architecture",
    "Call",
    "LinearMixer",
    "Linearize",
    "register_mixer",
    "supported_architectures",
]
