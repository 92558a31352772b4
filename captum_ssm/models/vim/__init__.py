"""Vision Mamba (Vim) in plain PyTorch, with a loader for the official checkpoints."""

from .builders import vim_small, vim_tiny
from .load import load_vim
from .mixer import VimMixer
from .model import VimBlock, VisionMamba

__all__ = ["VimBlock", "VimMixer", "VisionMamba", "load_vim", "vim_small", "vim_tiny"]
