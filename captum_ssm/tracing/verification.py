"""Whether an operator is the module that it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ReconstructionError

#: Largest max|a - b| / max|b| that ``verify`` accepts, by the dtype the model computed in.
#: Models in float64 are allowed as much as in float32, to which transformers and mamba_ssm round
#: parts of their recurrences.
TOLERANCES = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-1,
    torch.float16: 5e-2,
}
#: The same for float32 on a GPU, whose kernels multiply in TF32 where they see fit: 10 bits.
_TF32 = 5e-3
#: Tokens beyond which the tolerance grows with their number, as the rounding of long sums does,
#: and how far it grows.
_TOKENS, _MOST = 1024, 1e-3


def tolerance_for(output: Tensor) -> float:
    """The largest error accepted of an operator, by what the module can have computed in.

    Args:
        output: what the module returned, (B, L, E); to be asked within the autocast it ran under.
    """
    device, dtypes = output.device.type, {output.dtype}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    limit = max(TOLERANCES.get(dtype, TOLERANCES[torch.float32]) for dtype in dtypes)
    if device == "cuda" and output.dtype == torch.float32:
        limit = max(limit, _TF32)
    return max(limit, min(limit * output.shape[1] / _TOKENS, _MOST))


def relative_error(rebuilt: Tensor, real: Tensor) -> float:
    """max|a - b| / max|b| of what an operator returns against what its module returned.

    Args:
        rebuilt: a, in the precision in which it is compared.
        real: b, in the same shape.
    """
    scale = real.abs().max().to(rebuilt).clamp_min(torch.finfo(real.dtype).tiny)
    return float((rebuilt - real.to(rebuilt)).abs().max() / scale)


def require_same(name: str, architecture: str, error: float, limit: float) -> None:
    """Raise unless an operator reproduces its module's output.

    Args:
        name: the mixer's qualified name.
        architecture: the family of the mixer.
        error: see :func:`relative_error`.
        limit: the largest error accepted.

    Raises:
        ReconstructionError: naming the layer and the error.
    """
    if not error <= limit:
        raise ReconstructionError(
            f"Layer {name!r} ({architecture}): the operator reproduces the module's output with an "
            f"error of {error:.1e}, more than {limit:.0e}. The module is not what its adapter "
            "expects. If the adapter is yours, correct it; else please report this with the "
            "model's configuration. A module that is random, as with dropout, or computes in less "
            "than its dtype can be given a wider bound, as in verify=1e-2."
        )
