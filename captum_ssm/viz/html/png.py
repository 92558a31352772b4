"""Images as PNG files, for pages."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor


def png(picture: Tensor) -> bytes:
    """An image (H, W, 3) in [0, 1] as a PNG file of 8 bits per colour."""
    height, width, _ = picture.shape
    rows = (picture * 255).round().clamp(0, 255).to(torch.uint8).flatten(1)  # (H, 3 W)
    plain = torch.cat([rows.new_zeros(height, 1), rows], dim=1)  # filter 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    pixels = zlib.compress(plain.contiguous().numpy().tobytes(), 9)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
