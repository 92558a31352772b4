"""Which tokens of a vision model are patches, and where they lie in the image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_ssm.attr.call.layout import ImageProbe
from captum_ssm.errors import InputError
from captum_ssm.tracing import trace


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches among a model's tokens.

    Attributes:
        index: places of the patches in the sequence, row by row, (h w,).
        grid: how many there are down and across, (h, w).
        tokens: L, all tokens.
    """

    index: Tensor
    grid: tuple[int, int]
    tokens: int

    def cls(self) -> int:
        """The place of the one token that is no patch."""
        others = sorted(set(range(self.tokens)) - set(self.index.tolist()))
        if len(others) != 1:
            raise InputError(
                f"The model has {self.tokens} tokens for {math.prod(self.grid)} patches; one more, "
                "the cls token, is needed."
            )
        return others[0]


def patches_of(model: nn.Module, image: Tensor) -> Patches:
    """The patches that a model makes of an image.

    Args:
        model: whose first mixer gets all patches.
        image: (1, C, H, W).
    """
    probe = ImageProbe(model)
    with torch.no_grad(), probe.watch(), trace(model) as record:
        model(image)
    tokens = record.layers[0].tokens
    index, grid = probe.patches(model, image, tokens)
    return Patches(index, grid, tokens)
