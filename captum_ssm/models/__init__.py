"""Models: Vision Mamba in plain PyTorch, and the small trained ones that ship with the package."""

from .bundled import load_bundled
from .vim import VisionMamba, load_vim, vim_small, vim_tiny

__all__ = ["VisionMamba", "load_bundled", "load_vim", "vim_small", "vim_tiny"]
