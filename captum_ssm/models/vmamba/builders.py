"""Build the released sizes of VMamba, in the version with ``v05_noz`` mixers."""

from __future__ import annotations

from typing import Any

from .model import VMamba


def vmamba_tiny(**options: Any) -> VMamba:
    """Build VMamba-T (s1l8), random weights: widths 96 to 768, 14 blocks, 30 million parameters.

    The model is in training mode. To load trained weights, use :func:`load_vmamba`.

    Args:
        **options: arguments of :class:`~captum_ssm.models.VMamba`; ``ssm_ratio=2.0`` and
            ``depths=(2, 2, 5, 2)`` build the variant s2l5.

    Example:
        >>> import torch
        >>> from captum_ssm.models import vmamba_tiny
        >>> with torch.device("meta"):  # only shapes, no memory
        ...     model = vmamba_tiny()
        >>> round(sum(weight.numel() for weight in model.parameters()) / 1e6)
        30
    """
    return _released(options, depths=(2, 2, 8, 2))


def vmamba_small(**options: Any) -> VMamba:
    """Build VMamba-S (s2l15), random weights: widths 96 to 768, 21 blocks, 50 million parameters.

    The model is in training mode. To load trained weights, use :func:`load_vmamba`.

    Args:
        **options: arguments of :class:`~captum_ssm.models.VMamba`.

    Example:
        >>> import torch
        >>> from captum_ssm.models import vmamba_small
        >>> with torch.device("meta"):
        ...     model = vmamba_small(num_classes=10)
        >>> tuple(model.classifier.head.weight.shape)
        (10, 768)
    """
    return _released(options, depths=(2, 2, 15, 2), ssm_ratio=2.0)


def vmamba_base(**options: Any) -> VMamba:
    """Build VMamba-B (s2l15), random weights: widths 128 to 1024, 21 blocks, 89 million parameters.

    The model is in training mode. To load trained weights, use :func:`load_vmamba`.

    Args:
        **options: arguments of :class:`~captum_ssm.models.VMamba`.

    Example:
        >>> import torch
        >>> from captum_ssm.models import vmamba_base
        >>> with torch.device("meta"):
        ...     model = vmamba_base()
        >>> [len(layer.blocks) for layer in model.layers]
        [2, 2, 15, 2]
    """
    return _released(options, depths=(2, 2, 15, 2), ssm_ratio=2.0, dims=128)


def _released(options: dict[str, Any], **size: Any) -> VMamba:
    common: dict[str, Any] = {
        "d_state": 1,
        "ssm_ratio": 1.0,
        "conv_bias": False,
        "forward_type": "v05_noz",
    }
    return VMamba(**(common | size | options))
