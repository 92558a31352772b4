"""Whether numbers are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from .maps import unseen


def all_finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite.

    The least and the greatest entry tell, which takes a tenth of the time of asking them all.
    """
    with unseen():
        return not x.numel() or bool(torch.stack(torch.aminmax(x)).isfinite().all())
