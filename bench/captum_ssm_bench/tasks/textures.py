"""Textures: pieces of the photographs that scikit-image ships, for training and for testing."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm._optional import optional

#: Photographs that come with scikit-image itself; nothing is downloaded.
PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel")

#: A photograph is so many crops high, and each of its halves half as many wide.
_CROPS = 4


@cache
def photographs(side: int, held_out: bool) -> Tensor:
    """The left halves of photographs or, held out, the right ones, 0 to 1, (6, 3, 4 S, 2 S)."""
    data = optional("skimage.data", "scikit-image", "A textured background")
    return torch.stack([_half(getattr(data, name)(), side, held_out) for name in PHOTOGRAPHS])


def _half(pixels: object, side: int, held_out: bool) -> Tensor:
    """Half of a photograph (H, W) or (H, W, 3) of bytes."""
    image = torch.as_tensor(pixels, dtype=torch.float32) / 255
    image = image.expand(3, -1, -1) if image.dim() == 2 else image.movedim(-1, 0)
    middle = image.shape[-1] // 2
    half = image[..., middle:] if held_out else image[..., :middle]
    size = (_CROPS * side, _CROPS * side // 2)
    # halved first and resized then, so that no pixel of one half reaches the other
    return F.interpolate(half[None], size, mode="bilinear", antialias=True)[0]


def textures(count: int, side: int, held_out: bool, generator: torch.Generator) -> Tensor:
    """Random crops (B, 3, S, S), mirrored at random, each channel of mean 0 and within -1 to 1."""
    known = photographs(side, held_out)
    number, _, height, width = known.shape

    def integers(stop: int) -> Tensor:
        return torch.randint(stop, (count, 1, 1), generator=generator)

    def places(stop: int) -> Tensor:
        """Neighbouring rows or columns (B, 1, S), forwards or backwards."""
        forward = torch.arange(side).expand(count, 1, side)
        return integers(stop - side + 1) + torch.where(
            integers(2) == 1, forward, side - 1 - forward
        )

    crops = known[integers(number), :, places(height).mT, places(width)].movedim(-1, 1).contiguous()
    centred = crops - crops.mean((-2, -1), keepdim=True)
    spread = centred.std((-2, -1), keepdim=True)
    # squashed, so that a glint cannot outshine an object; 0.01 keeps noise of flat crops small
    return torch.tanh(centred / (spread + 0.01))
