"""Files of weights that claim what they do not hold."""

from __future__ import annotations

import json
import struct
from typing import Any


def safetensors(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A file of safetensors with this header, whose length may be another than it says."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(start: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


#: By what is wrong with it.
BROKEN = {
    "a header of 10^15 bytes": safetensors({}, length=10**15),
    "a tensor of 10^15 numbers": safetensors({"a": tensor(0, 4 * 10**15, 10**9, 10**6)}),
    "overlapping tensors": safetensors(
        {"a": tensor(0, 8, 2), "b": tensor(4, 12, 2)}, body=bytes(12)
    ),
    "a tensor that ends before it starts": safetensors({"a": tensor(8, 0, 2)}, body=bytes(8)),
    "fewer bytes than its shape needs": safetensors({"a": tensor(0, 4, 2)}, body=bytes(4)),
    "no header": b"\1\2",
    "a header that is not JSON": struct.pack("<Q", 4) + b"abcd",
    "a deep header": struct.pack("<Q", 10**5) + b"[" * 10**5,
}
