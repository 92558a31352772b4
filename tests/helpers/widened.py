"""Models that compute some parts in float32, made to compute them in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InFloat64(TorchDispatchMode):
    """Inside the ``with`` what asks torch for float32 gets float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        by_default = torch.float32 if func is torch.ops.aten.zeros.default else None
        if kwargs.get("dtype", by_default) is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
