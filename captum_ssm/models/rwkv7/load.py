"""Load RWKV-7 checkpoints; all sizes are inferred from the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..checkpoints import build_model, read_checkpoint, shape_of
from .model import RWKV7

#: Unused weights of the first block in later checkpoints.
_UNUSED = tuple(f"blocks.0.att.v{n}" for n in range(3))


def load_rwkv7(path: str | Path) -> RWKV7:
    """Load an RWKV-7 language model, such as the published ``RWKV-x070-World-*.pth``.

    Nothing is downloaded, and all sizes are inferred from the weights. Models with additional
    weights, such as embeddings inside blocks, are refused.

    Args:
        path: a torch file, whose code is not run, or a ``.safetensors`` file.

    Returns:
        The model in evaluation mode on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: when the weights do not fit an RWKV-7; the message names the keys.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.models import RWKV7, load_rwkv7
        >>> trained = RWKV7(vocab_size=20, width=16, depth=2, head_size=8).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(trained.state_dict(), Path(folder, "rwkv7.pth"))
        ...     model = load_rwkv7(Path(folder, "rwkv7.pth"))
        >>> ids = torch.tensor([[3, 1, 4]])
        >>> torch.equal(model(ids), trained(ids))
        True
    """
    stored = read_checkpoint(Path(path))
    weights = {key: weight for key, weight in stored.items() if key not in _UNUSED}
    return build_model(path, "an RWKV-7", lambda: RWKV7(**_arguments(weights)), weights)


def _arguments(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Infer the arguments of RWKV7 from the shapes of weights."""

    def shape(key: str) -> torch.Size:
        sizes = shape_of(weights, key, 2)
        if 0 in sizes:
            raise CheckpointError(
                f"{key!r} has shape {tuple(sizes)}, which is empty. Save the weights again."
            )
        return sizes

    # blocks are counted: the largest number in a damaged file could be huge
    blocks = {key.split(".")[1] for key in weights if key.startswith("blocks.")}
    vocab_size, width = shape("emb.weight")
    heads, head_size = shape("blocks.0.att.r_k")
    if heads * head_size != width:
        raise CheckpointError(
            f"'blocks.0.att.r_k' has shape {(heads, head_size)}, but 'emb.weight' has width {width}"
            ", not their product. Pass the weights of one RWKV-7 model."
        )
    return {
        "vocab_size": vocab_size,
        "width": width,
        "depth": len(blocks),
        "head_size": head_size,
        "inner": shape("blocks.0.ffn.key.weight")[0],
        "decay_rank": shape("blocks.0.att.w1")[1],
        "step_rank": shape("blocks.0.att.a1")[1],
        "value_rank": shape("blocks.1.att.v1")[1] if len(blocks) > 1 else 1,
        "gate_rank": shape("blocks.0.att.g1")[1],
    }
