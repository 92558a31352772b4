"""What is sent to the page: JSON, in which a number that is none is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def encoded(value: Any) -> bytes:
    """A value as JSON that any browser reads."""
    return json.dumps(plain(value), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """A value in JSON's own types; NaN and infinity become None, as which JSON knows no other."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "__iter__"):
        return [plain(inner) for inner in value]
    return str(value)
