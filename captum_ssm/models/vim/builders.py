"""Build the released sizes of Vision Mamba, with short names or with the published names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import OptionError
from .model import VisionMamba

#: Arguments that timm.create_model passes to each builder; they are ignored here.
_OF_TIMM = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


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


def _published(make: Callable[..., VisionMamba], name: str) -> Callable[..., VisionMamba]:
    """Return a builder with the published name that accepts the published code's keywords."""

    def published(pretrained: bool = False, **options: Any) -> VisionMamba:
        return make(**_from_published(pretrained, options))

    variant = "patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2"
    published.__name__ = published.__qualname__ = f"{make.__name__}_{variant}"
    published.__doc__ = f"""Build {name} with random weights, by its published name and keywords.

    Args:
        pretrained: must be False, since nothing is downloaded. Default: False.
        **options: keywords of the published model, such as ``if_cls_token`` and
            ``use_middle_cls_token``, or of :class:`~captum_ssm.models.vim.VisionMamba`.

    Raises:
        OptionError: when ``pretrained`` is true.

    Example:
        >>> from captum_ssm.models.vim import {published.__name__} as published
        >>> published(depth=1, use_middle_cls_token=False).cls_positions(patches=196)
        [0]
        >>> published(depth=1, use_double_cls_token=True).cls_positions(patches=196)
        [0, 197]
    """
    return published


vim_tiny_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2 = _published(
    vim_tiny, "Vim-Ti"
)
vim_small_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2 = _published(
    vim_small, "Vim-S"
)


def register_with_timm() -> list[str]:
    """Register the published names with ``timm.create_model``, and return these names.

    Raises:
        ImportError: when timm is not installed.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> from captum_ssm.models.vim import register_with_timm
        >>> tiny, small = register_with_timm()  # doctest: +SKIP
        >>> model = timm.create_model(tiny, num_classes=10)  # doctest: +SKIP
    """
    from timm.models import is_model, model_entrypoint, register_model

    entries = (
        vim_tiny_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2,
        vim_small_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2,
    )
    for entry in entries:
        if not is_model(entry.__name__) or model_entrypoint(entry.__name__) is not entry:
            register_model(entry)
    return [entry.__name__ for entry in entries]


def _from_published(pretrained: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Convert the published keywords to keywords of :class:`VisionMamba`."""
    if pretrained:
        raise OptionError(
            "pretrained=True is not accepted, because nothing is downloaded. Download the "
            "checkpoint and call captum_ssm.models.load_vim(path)."
        )
    options = {name: value for name, value in options.items() if name not in _OF_TIMM}
    # two spellings occur in copies of the published code
    if "if_devide_out" in options:
        options["if_divide_out"] = options.pop("if_devide_out")
    if "if_abs_pos_embed" in options:
        options["pos_embed"] = options.pop("if_abs_pos_embed")
    has_cls = options.pop("if_cls_token", True)
    double = options.pop("use_double_cls_token", False)
    middle = options.pop("use_middle_cls_token", True)
    place = "double" if double else "middle" if middle else "head"
    return {"final_pool_type": "mean", "cls_token": place if has_cls else "none"} | options
