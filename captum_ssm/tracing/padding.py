"""Examples without a single real token, of which there is nothing to explain."""

from __future__ import annotations

from torch import Tensor

from ..errors import PaddedExampleError
from ..operators.kernels.truths import holds


def require_real_tokens(mask: Tensor | None) -> None:
    """Raise unless every example has a token that is not padding.

    Args:
        mask: True for real tokens (B, L), or None if no token is padding.

    Raises:
        PaddedExampleError: naming the first example that has none.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing import require_real_tokens
        >>> require_real_tokens(torch.tensor([[True, False], [True, True]]))
    """
    if mask is None:
        return
    empty = ~mask.any(-1)
    if not holds(~empty.any()):
        raise PaddedExampleError(int(empty.nonzero()[0]))
