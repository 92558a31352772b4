"""Load Vision Mamba checkpoints; all sizes are inferred from the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mode
from typing import Any

import torch

from ...errors import CheckpointError
from ..checkpoints import Weights, build_model, layer_count, read_checkpoint, shape_of
from .model import VisionMamba

#: Image side of the released models.
_RELEASED_SIDE = 224


def load_vim(path: str | Path, **options: Any) -> VisionMamba:
    """Load a Vision Mamba checkpoint, such as the official ones; nothing is downloaded.

    All sizes are inferred from the weights. Set ``cls_token``, ``final_pool_type``,
    ``if_divide_out`` and ``norm_epsilon`` if they are not the defaults. Pass ``pos_embed=False``
    if there are no position embeddings, and ``img_size`` if the patch grid is not square. Pass
    ``stride`` if patches overlap, unless they overlap by half in images of 224 x 224.

    Args:
        path: a ``.safetensors`` file; or a torch file, whose code is not run, with the weights or a
            dict that has the weights as ``"model"``.
        **options: arguments of :class:`~captum_ssm.models.vim.VisionMamba` that replace inferred
            values.

    Returns:
        The model in evaluation mode on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: when the weights do not fit a Vision Mamba; the message names the keys.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.models import VisionMamba, load_vim
        >>> trained = VisionMamba(32, patch_size=8, depth=2, embed_dim=16, num_classes=5).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"model": trained.state_dict()}, Path(folder, "vim.pth"))
        ...     model = load_vim(Path(folder, "vim.pth"))
        >>> images = torch.rand(1, 3, 32, 32)
        >>> torch.equal(model(images), trained(images))
        True
    """
    weights = read_checkpoint(Path(path))
    return build_model(
        path, "a Vision Mamba", lambda: VisionMamba(**_arguments(weights, options)), weights
    )


def _arguments(weights: Weights, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of VisionMamba: values inferred from the weights, and the options."""

    def any_name_has(part: str) -> bool:  # in any layer: a later check names layers without it
        return any(part in key for key in weights)

    embed_dim, channels, patch, _ = shape_of(weights, "patch_embed.proj.weight", 4)
    without_v2 = "v1" if any_name_has(".A_b_log") else "none"
    sizes: dict[str, Any] = {
        "embed_dim": embed_dim,
        "channels": channels,
        "patch_size": patch,
        "d_inner": _usual_shape(weights, "in_proj.weight", 2)[0] // 2,
        "d_state": _usual_shape(weights, "A_log", 2)[1],
        "d_conv": _usual_shape(weights, "conv1d.weight", 3)[2],
        "dt_rank": _usual_shape(weights, "dt_proj.weight", 2)[1],
        "depth": layer_count(weights, "layers."),
        "num_classes": shape_of(weights, "head.weight", 2)[0] if any_name_has("head.") else 0,
        "cls_token": "double" if "cls_token_head" in weights else "middle",
        "pos_embed": True,
        "rms_norm": not any_name_has("norm_f.bias"),
        "bimamba_type": "v2" if any_name_has("_b.") else without_v2,
        "bias": any_name_has("in_proj.bias"),
        "conv_bias": any_name_has("conv1d.bias"),
        "init_layer_scale": 1.0 if any_name_has(".gamma") else None,
    }
    sizes |= options
    if sizes["pos_embed"]:
        tokens = shape_of(weights, "pos_embed", 3)[1]
        patches = tokens - {"none": 0, "double": 2}.get(sizes["cls_token"], 1)
        sizes |= _infer_image_size(patches, sizes["patch_size"], options)
    return sizes


def _infer_image_size(patches: int, patch: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Infer image size and stride from the number of patches; the overlap is half or none."""
    side = math.isqrt(patches)
    strides = [options["stride"]] if options.get("stride") else [patch, max(1, patch // 2)]
    image = options.get("img_size", _RELEASED_SIDE)
    height, width = (image, image) if isinstance(image, int) else image
    for stride in strides:
        if ((height - patch) // stride + 1) * ((width - patch) // stride + 1) == patches:
            return {"img_size": image, "stride": stride}
    if side**2 != patches or "img_size" in options:
        raise CheckpointError(
            f"'pos_embed' has {patches} patches, which does not fit img_size={image} with a stride "
            f"of {strides}. Pass img_size=(height, width), and stride if patches overlap."
        )
    return {"img_size": (side - 1) * strides[0] + patch, "stride": strides[0]}


def _usual_shape(weights: Weights, name: str, dims: int) -> torch.Size:
    """Return the shape that a weight has in most layers; a later check names other layers."""
    keys = [k for k in weights if k.startswith("layers.") and k.endswith(f".mixer.{name}")]
    if not keys:
        raise CheckpointError(
            f"its weights lack 'layers.0.mixer.{name}'. Pass all weights of a Vision Mamba."
        )
    usual = mode(weights[key].shape for key in keys)
    return shape_of(weights, next(key for key in keys if weights[key].shape == usual), dims)
