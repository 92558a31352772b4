"""Vision Mamba (Vim) in plain PyTorch, with a loader for the official checkpoints."""

from .builders import (
    register_with_timm,
    vim_small,
    vim_small_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2,
    vim_tiny,
    vim_tiny_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2,
)
from .load import load_vim
from .mixer import VimMixer
from .model import VimBlock, VisionMamba

__all__ = [
    "VimBlock",
    "VimMixer",
    "VisionMamba",
    "load_vim",
    "register_with_timm",
    "vim_small",
    "vim_small_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2",
    "vim_tiny",
    "vim_tiny_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2",
]
