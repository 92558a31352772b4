"""Load VMamba checkpoints; all sizes are inferred from the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from ..checkpoints import Weights, build_model, read_checkpoint, shape_of
from .mixer import form_of
from .model import VMamba

#: Patterns of weight names in the first release, with the later names.
_LATER_NAMES = (
    (r"^patch_embed\.proj\.", "patch_embed.0."),
    (r"^patch_embed\.norm\.", "patch_embed.2."),
    (r"^(layers\.\d+\.blocks\.\d+)\.ln_1\.", r"\1.norm."),
    (r"^(layers\.\d+\.blocks\.\d+)\.self_attention\.", r"\1.op."),
    (r"^(norm|head)\.", r"classifier.\1."),
)
#: Weights of projections, which channels-first checkpoints store as 1 x 1 convolutions.
_PROJECTION = re.compile(r"\.(in_proj|out_proj|fc1|fc2|reduction)\.weight$")


def load_vmamba(path: str | Path, **options: Any) -> VMamba:
    """Load a VMamba checkpoint, such as the official ones; nothing is downloaded.

    All sizes, and the presence of a gate, are inferred from the weights. Set ``act`` if it is not
    SiLU, and ``forward_type`` if the scan orders or the output activation are not the defaults, as
    in ``"v051d_noz"`` or ``"v05_noz_oact"``. Channels-first and channels-last models are accepted.

    Args:
        path: a ``.safetensors`` file; or a torch file, whose code is not run, with the weights or a
            dict that has the weights as ``"model"``.
        **options: arguments of :class:`~captum_ssm.models.VMamba` that replace inferred values.

    Returns:
        The model in evaluation mode on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: when the weights do not fit a VMamba; the message names the keys.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.models import VMamba, load_vmamba
        >>> trained = VMamba(depths=(1, 1), dims=8, num_classes=5, d_state=2).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"model": trained.state_dict()}, Path(folder, "vmamba.pth"))
        ...     model = load_vmamba(Path(folder, "vmamba.pth"))
        >>> images = torch.rand(1, 3, 32, 32)
        >>> torch.equal(model(images), trained(images))
        True
    """
    weights = _with_later_names(read_checkpoint(Path(path)))
    return build_model(path, "a VMamba", lambda: VMamba(**_arguments(weights, options)), weights)


def _with_later_names(weights: Weights) -> dict[str, Tensor]:
    """Rename weights of the first release, and convert 1 x 1 convolutions to matrices."""
    renamed = {}
    for key, weight in weights.items():
        for pattern, new in _LATER_NAMES:
            key = re.sub(pattern, new, key)
        if _PROJECTION.search(key) and weight.shape[2:] == (1, 1):
            weight = weight.flatten(1)
        renamed[key] = weight
    return renamed


def _arguments(weights: Weights, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of VMamba: values inferred from the weights, and the options."""
    block = "layers.0.blocks.0"
    width, inner = shape_of(weights, f"{block}.op.out_proj.weight", 2)
    projected, _ = shape_of(weights, f"{block}.op.in_proj.weight", 2)
    _, _, rank = shape_of(weights, f"{block}.op.dt_projs_weight", 3)
    overlapping = "patch_embed.5.weight" in weights
    _, channels, kernel, _ = shape_of(weights, "patch_embed.0.weight", 4)
    blocks = {
        (int(match[1]), int(match[2]))
        for key in weights
        if (match := re.match(r"layers\.(\d+)\.blocks\.(\d+)\.", key))
    }
    stages = 1 + max(stage for stage, _ in blocks)
    hidden = 0
    if any(".mlp." in key for key in weights):
        hidden, _ = shape_of(weights, f"{block}.mlp.fc1.weight", 2)
    convolution, positions = f"{block}.op.conv2d.weight", weights.get("pos_embed")
    return {
        "channels": channels,
        # two overlapping convolutions have stride patch_size / 2, and a kernel 1 larger
        "patch_size": 2 * (kernel - 1) if overlapping else kernel,
        "num_classes": shape_of(weights, "classifier.head.weight", 2)[0],
        "depths": [len({b for s, b in blocks if s == stage}) for stage in range(stages)],
        "dims": [
            shape_of(weights, f"layers.{stage}.blocks.0.op.out_proj.weight", 2)[0]
            for stage in range(stages)
        ],
        "mlp_ratio": hidden / width,
        "patch_norm": "patch_embed.2.weight" in weights,
        "patch_embed": "v2" if overlapping else "v1",
        "downsample": _downsample(weights),
        "pos_embed": None if positions is None else tuple(positions.shape[2:]),
        "d_state": shape_of(weights, f"{block}.op.A_logs", 2)[1],
        "ssm_ratio": inner / width,
        "dt_rank": None if rank == -(-width // 16) else rank,
        "d_conv": shape_of(weights, convolution, 4)[2] if convolution in weights else 0,
        "conv_bias": f"{block}.op.conv2d.bias" in weights,
        "forward_type": _forward_type(weights, projected == 2 * inner, options),
        **{name: value for name, value in options.items() if name != "forward_type"},
    }


def _forward_type(weights: Weights, gated: bool, options: Mapping[str, Any]) -> str:
    """Return the option or inferred ``forward_type``; raise if its gate contradicts the weights."""
    normed = "layers.0.blocks.0.op.out_norm.weight" in weights
    forward_type: str = options.get(
        "forward_type", "v05" + "_noz" * (not gated) + "_onnone" * (not normed)
    )
    if form_of(forward_type).gate != gated:
        raise CheckpointError(
            f"forward_type={forward_type!r} {'lacks' if gated else 'has'} a gate, but its weights "
            f"{'have' if gated else 'lack'} one. Pass a forward_type with{'out' * gated} _noz."
        )
    return forward_type


def _downsample(weights: Weights) -> str:
    """Infer the kind of layers between stages; ``"v3"`` if there is only one stage."""
    if "layers.0.downsample.reduction.weight" in weights:
        return "v1"
    convolution = weights.get("layers.0.downsample.1.weight")
    return "v2" if convolution is not None and convolution.shape[-1] == 2 else "v3"
