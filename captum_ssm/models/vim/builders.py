"""Build the released sizes of Vision Mamba."""

from __future__ import annotations

from typing import Any

from .model import VisionMamba


def vim_tiny(**options: Any) -> VisionMamba:
    """Build Vim-Ti with random weights: width 192, 24 blocks, 7 million parameters.

    The model is in training mode. To load trained weights, use :func:`load_vim`.

    Args:
        **options: arguments of :class:`~captum_ssm.models.vim.VisionMamba`.

    Example:
        >>> from captum_ssm.models import vim_tiny
        >>> model = vim_tiny(num_classes=10)
        >>> tuple(model.head.weight.shape), len(model.layers), sum(model.grid)  # 14 + 14 patches
        ((10, 192), 24, 28)
    """
    return VisionMamba(**({"embed_dim": 192} | options))


def vim_small(**options: Any) -> VisionMamba:
    """Build Vim-S with random weights: width 384, 24 blocks, 26 million parameters.

    The model is in training mode. To load trained weights, use :func:`load_vim`.

    Args:
        **options: arguments of :class:`~captum_ssm.models.vim.VisionMamba`.

    Example:
        >>> import torch
        >>> from captum_ssm.models import vim_small
        >>> with torch.device("meta"):  # only shapes, no memory
        ...     model = vim_small()
        >>> round(sum(weight.numel() for weight in model.parameters()) / 1e6)
        26
    """
    return VisionMamba(**({"embed_dim": 384} | options))
